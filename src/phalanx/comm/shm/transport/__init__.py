"""The processes of one host: how they find, signal and watch each other, and what memory they show."""
