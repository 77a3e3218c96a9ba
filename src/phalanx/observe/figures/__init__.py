"""What the report shows, as plain values: sentences, bars, rows. No page, no plotting."""
