"""The choices of a plan: layouts, rows, storage, stages, what is run again; and what every other choice would cost."""
