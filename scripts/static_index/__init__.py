"""The static index that scripts/make_index.py writes: its files, its pages, and which files are yanked."""
