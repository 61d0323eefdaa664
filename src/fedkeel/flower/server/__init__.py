"""The server of a federation: who is connected, what is sent, what is taken of the replies."""
