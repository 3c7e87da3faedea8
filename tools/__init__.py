"""Programs for people who work on the repository; nothing here is installed."""
