"""The Ray engine: clients trained by actors on one machine or on several."""
