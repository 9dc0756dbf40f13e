"""Text that a server made of token ids, brought together with those ids again."""

from collections import deque
from collections.abc import Iterable

from k3_core.chat import protocol
from k3_core.chat.decoder import StreamParser
from k3_core.chat.markers import TextScanner


class TokenAligner:
    """Cuts text into (text, is_structure) by the token ids that come with it.

    A server may hold text back (stop strings, unfinished characters), cut it, or leave out the last token's: ids run
    ahead of the text by as much. Text that does not agree with the ids, or has none, is scanned for literals.
    """

    def __init__(self, parser: StreamParser) -> None:
        self._parser = parser
        self._ahead: deque[tuple[str, bool]] = deque()
        self._consumed = 0  # of the first waiting piece
        self._scanner: TextScanner | None = None

    def feed(self, text: str, ids: Iterable[int]) -> list[tuple[str, bool]]:
        """Pieces of ``text``."""
        if self._scanner is not None:
            return list(self._scanner.feed(text))
        self._ahead.extend(self._parser.pieces(ids))
        pieces: list[tuple[str, bool]] = []
        position = 0
        while position < len(text):
            piece, is_structure = self._ahead[0] if self._ahead else ("", False)
            size = min(len(text) - position, len(piece) - self._consumed)
            if size == 0 or piece[self._consumed : self._consumed + size] != text[position : position + size]:
                self._scanner = TextScanner()
                pieces += self._scanner.feed((piece[: self._consumed] if is_structure else "") + text[position:])
                return pieces
            if not is_structure:
                pieces.append((text[position : position + size], False))
            self._consumed += size
            position += size
            if self._consumed == len(piece):
                self._ahead.popleft()
                self._consumed = 0
                if is_structure:
                    pieces.append((piece, True))
        return pieces

    def finish(self) -> list[tuple[str, bool]]:
        """The terminator whose text was left out, if that is what the ids end with."""
        rest = list(self._ahead)
        ended = len(rest) == 1 and rest[0][1] and rest[0][0] in protocol.TERMINATORS
        return rest if ended and self._scanner is None else []
