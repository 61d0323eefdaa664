"""What an attacker learns from the messages of a round: attacks, and how well they did."""
