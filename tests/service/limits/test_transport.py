"""Responses in one write."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

from tinsmith.service.limits.transport import JoinedWrites

HEAD, BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"{}"


def test_head_and_body_of_a_response_are_one_write() -> None:
    """Break `write`: leave out the head that is held."""

    async def main() -> None:
        raw = Mock()
        joined = JoinedWrites(raw, asyncio.get_running_loop())
        for _ in range(2):
            joined.write(HEAD)
            joined.write(BODY)
        await asyncio.sleep(0)
        assert [call.args[0] for call in raw.write.call_args_list] == [HEAD + BODY] * 2

    asyncio.run(main())


def test_head_without_a_body_is_written_soon_and_before_the_end() -> None:
    """Responses to HEAD have no body, and those of a stream come later. Break `write` or `close`: no `_flush`."""

    async def main() -> None:
        raw = Mock()
        joined = JoinedWrites(raw, asyncio.get_running_loop())
        joined.write(HEAD)
        raw.write.assert_not_called()
        await asyncio.sleep(0)
        raw.write.assert_called_once_with(HEAD)
        joined.write(BODY)
        joined.write(HEAD)
        joined.close()
        assert [call[0] for call in raw.method_calls] == ["write", "write", "write", "close"]
        await asyncio.sleep(0)
        assert raw.write.call_count == 3

    asyncio.run(main())
