"""Selection of the clients of a round by their losses: power of choice, and Oort's."""
