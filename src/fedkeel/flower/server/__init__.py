"""The server of a federation: which nodes are connected, what they are asked, and their replies."""
