"""Other systems, a folder each with everything of that system: run files, Python API, environments, tables.

The rest of Tinsmith imports nothing from here. Entry points in pyproject.toml register what an integration provides
(`tinsmith.entry_points`), as those of any other package do: docs/code/packages.md.
"""
