"""What several tests share; pytest collects nothing here."""
