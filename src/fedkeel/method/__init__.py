"""Methods: parts, their composition, the local loop and the server round."""
