"""What the tables of the config are made of: names for kinds of values, and the base of all."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
# a description says what is allowed where the bound alone would not tell a person
Text = Annotated[str, Meta(min_length=1, description="text that is not empty")]
#: a name that becomes a path component and part of metric names.
Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}$",
        description="letters, digits and . _ @ + -, the first a letter or digit, 128 at most",
    ),
]
#: a function of the user's; it may be an attribute of something in the module.
Function = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$",
        description='"module:function", such as "my_tools:score"',
    ),
]
#: octal mode of files or directories.
Mode = Annotated[
    str, Meta(pattern=r"^0?[0-7]{3,4}$", description='an octal mode as text, such as "0644"')
]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table: frozen, unknown keys are errors."""
