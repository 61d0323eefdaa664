"""What a value of a user is, as a text that its digest is made of."""
