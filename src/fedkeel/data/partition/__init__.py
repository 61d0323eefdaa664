"""Dividing: recipes that give every example to a client."""
