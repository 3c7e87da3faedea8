"""Backup, restore and verification of a data folder and its database, also while a server uses them."""
