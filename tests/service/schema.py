"""The OpenAPI schema of the service, for fuzzing: routes read raw bodies, so what each parses is found in its source.

Ids of things that exist may be given, so that what is generated gets further than "there is no such session".
"""

from __future__ import annotations
