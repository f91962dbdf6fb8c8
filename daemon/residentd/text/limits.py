"""The named maxima of the text package. Each is tested at its value and one above.

A CEILING is the most that a configuration may allow: its [limits] are checked before a request comes here.
"""

from __future__ import annotations

from typing import Final

STOPS_CEILING: Final = 64
STOP_CHARS_MAX: Final = 256

PROMPT_CHARS_CEILING: Final = 16 << 20
"""Of one prompt, and of the contents of one conversation together: four million tokens of English."""

MESSAGES_CEILING: Final = 16_384
ROLE_CHARS_MAX: Final = 64
REASON_CHARS_MAX: Final = 500  # of what a template says when it refuses messages

TOKENIZER_BYTES_MAX: Final = 128 << 20  # the largest in use (262,144 entries) have 33 MB
TEMPLATE_BYTES_MAX: Final = 256 << 10  # the longest in use (tool calling, several languages) have 30 KB

RENDER_STEPS_MAX: Final = 4_000_000
"""Syntax-tree nodes of loop and macro bodies, once per pass, plus calls: about a second of work.

The longest templates in use have 1,500 nodes, so 2,600 messages fit; with usual ones MESSAGES_CEILING do."""

RENDER_SECONDS_MAX: Final = 5.0
"""Looked at between steps: what the steps do not count (a comparison of long strings) ends here."""

RENDER_CHARS_MAX: Final = 128 << 20
"""Characters read and made by one rendering: about eight times the longest conversation."""

RENDERED_CHARS_MAX: Final = PROMPT_CHARS_CEILING + (1 << 20)
RENDER_RANGE_MAX: Final = 10_000  # items of one range() in a template
RENDER_WIDTH_MAX: Final = 1_000  # of an indent, a truncation or a formatted field
RENDER_INTEGER_BITS_MAX: Final = 256  # of a product or power in a template

BYTE_RUN_TOKENS_MAX: Final = 128
"""Byte tokens held back until their run ends, because one bad byte turns the whole run into U+FFFD."""

WHOLE_DECODE_LAG_TOKENS: Final = 16
"""Tokens held back for a decoder that is only known as a whole: nothing reaches further back in any that we met."""

WHOLE_DECODE_LOOKS: Final = 64
"""Such a stream of n tokens gives out text once in n / 64 tokens: decoding all of it each time costs n squared."""
