"""Examples of the server's own, on which it trains as a client does."""
