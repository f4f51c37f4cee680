"""Command line of autopart."""
