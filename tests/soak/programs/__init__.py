"""Whole programs, started as users start them, that end and fail in every way."""
