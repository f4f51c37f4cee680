"""A plan as data: what it holds, its file, and what the user has fixed of it."""
