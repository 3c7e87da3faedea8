"""A tool server."""

import verifiers.v1 as vf


class WordTools(vf.Toolset[vf.ToolsetConfig]):
    """Tools about words."""

    TOOL_PREFIX = "words"

    @vf.tool
    def length(self, word: str) -> int:
        """Number of letters of a word."""
        return len(word)


if __name__ == "__main__":
    WordTools.run()
