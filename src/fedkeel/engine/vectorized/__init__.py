"""The vectorized engine: several clients trained side by side, by compiled steps."""
