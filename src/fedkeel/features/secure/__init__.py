"""Secure sums: a server adds up vectors of several participants and sees no single one."""
