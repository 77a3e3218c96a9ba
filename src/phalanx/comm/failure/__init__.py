"""What a rank says, waits for and is told when another rank fails."""
