"""Virtual time, and servers that do not wait: who is how fast, who is there, and who replies."""
