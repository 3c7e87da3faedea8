"""Trinity-RFT: its run files, and a stand-in for its package in plugin files (docs/from/trinity.md)."""
