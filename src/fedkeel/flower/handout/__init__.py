"""What the administrators of a federation get: pages to print, units, a container file."""
