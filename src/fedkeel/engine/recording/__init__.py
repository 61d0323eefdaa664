"""Functions of tensors, recorded once and run again without Python."""
