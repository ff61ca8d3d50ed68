"""Types of pydantic's fields, each with JSON values that fit its schema and JSON values that do not."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional

import pydantic
from pydantic import Field, networks
from typing_extensions import TypedDict

U = "550e8400-e29b-41d4-a716-446655440000"


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(pydantic.BaseModel):
    x: int
    y: int = 0


class Node(pydantic.BaseModel):
    value: int
    children: list[Node] = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


class Pair(NamedTuple):
    a: int
    b: str


class Options(TypedDict):
    a: int
    b: NotRequired[str]


@pydantic.dataclasses.dataclass
class Size:
    width: int


class Closed(pydantic.BaseModel, extra="forbid"):
    a: int


class Open(pydantic.BaseModel, extra="allow"):
    a: int


PYDANTIC: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "str": (str, ["a"], [1]),
    "int": (int, [1, -3], ["a", 1.5]),
    "float": (float, [1.5, 2], ["a"]),
    "bool": (bool, [True], [1]),
    "None": (None, [None], [1]),
    "Any": (Any, [1, {"a": []}], []),
    "object": (object, [1], []),
    "bytes": (bytes, ["ab"], [1]),
    "Decimal": (decimal.Decimal, ["1.25", 3, "-7"], [None]),
    "Decimal_places": (Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)], ["1.25"], [None]),
    "Fraction": (fractions.Fraction, ["1/3"], []),
    "datetime": (datetime.datetime, ["2024-02-29T12:30:00Z", "2024-02-29T12:30:00.123456+02:00"], ["2024-02-29", "a"]),
    "date": (datetime.date, ["2024-02-29"], ["2023-02-29", "0000-01-01", "24-1-1"]),
    "time": (datetime.time, ["12:30:00Z", "12:30:00.5+01:00"], ["25:00:00Z", "noon"]),
    "timedelta": (datetime.timedelta, ["P1DT12H", "PT5M"], ["1D", "P"]),
    "UUID": (uuid.UUID, [U], ["550e8400"]),
    "UUID1": (pydantic.UUID1, ["2c9a7a2e-6f43-11ee-b962-0242ac120002"], [U]),
    "UUID4": (pydantic.UUID4, [U], ["2c9a7a2e-6f43-11ee-b962-0242ac120002"]),
    "UUID7": (pydantic.UUID7, ["018f6c3e-7b5a-7cc1-9c5f-3a9f6f3f0f00"], [U]),
    "Path": (pathlib.Path, ["/tmp/a"], [1]),
    "PurePath": (pathlib.PurePath, ["a/b"], [1]),
    "FilePath": (pydantic.FilePath, [__file__], [1]),
    "DirectoryPath": (pydantic.DirectoryPath, ["/"], [1]),
    "NewPath": (pydantic.NewPath, ["/nowhere"], [1]),
    "Enum": (Color, ["red"], ["green"]),
    "IntEnum": (Level, [1], [3]),
    "Literal": (Literal["a", 1, True, None], ["a", 1, True, None], ["b", 2]),
    "Pattern": (re.Pattern[str], ["a+"], [1]),
    "str_pattern": (Annotated[str, Field(pattern=r"^\w+-\d{3}$")], ["ab-123"], ["ab-12", "é-123"]),
    "str_lengths": (Annotated[str, Field(min_length=2, max_length=3)], ["ab"], ["a", "abcd"]),
    "int_bounds": (Annotated[int, Field(ge=1, lt=10)], [1, 9], [0, 10]),
    "multiple_of": (Annotated[int, Field(multiple_of=5)], [10], [7]),
    "PositiveInt": (pydantic.PositiveInt, [1], [0]),
    "NonNegativeFloat": (pydantic.NonNegativeFloat, [0, 0.5], [-1]),
    "int64": (Annotated[int, Field(ge=-(2**63), le=2**63 - 1)], [5], ["a"]),
    "FiniteFloat": (pydantic.FiniteFloat, [1.5], ["a"]),
    "list": (list[int], [[], [1, 2]], [["a"]]),
    "list_lengths": (Annotated[list[int], Field(min_length=1, max_length=2)], [[1]], [[], [1, 2, 3]]),
    "bare_list": (list, [[1, "a"]], [1]),
    "set": (set[int], [[1, 2]], [["a"]]),
    "frozenset": (frozenset[str], [["a"]], [[1]]),
    "set_of_literals": (set[Literal["a", "b"]], [["a", "b"]], [["c"]]),
    "deque": (collections.deque[int], [[1]], [["a"]]),
    "tuple": (tuple[int, str], [[1, "a"]], [[1], [1, 2], [1, "a", 2]]),
    "tuple_any": (tuple[int, ...], [[1, 2]], [["a"]]),
    "empty_tuple": (tuple[()], [[]], [[1]]),
    "Sequence": (Sequence[int], [[1]], [["a"]]),
    "NamedTuple": (Pair, [[1, "a"]], [["a", 1]]),
    "dict": (dict[str, int], [{"a": 1}, {}], [{"a": "b"}]),
    "bare_dict": (dict, [{"a": [1]}], [1]),
    "Mapping": (Mapping[str, int], [{"a": 1}], [{"a": "b"}]),
    "Counter": (collections.Counter[str], [{"a": 1}], [{"a": "b"}]),
    "OrderedDict": (collections.OrderedDict[str, int], [{"a": 1}], [{"a": "b"}]),
    "defaultdict": (collections.defaultdict[str, int], [{"a": 1}], [{"a": "b"}]),
    "dict_lengths": (Annotated[dict[str, int], Field(min_length=1, max_length=2)], [{"a": 1}], [{}]),
    "dict_int_keys": (dict[int, str], [{"1": "a"}], [{"1": 2}]),
    "dict_enum_keys": (dict[Color, int], [{"red": 1}], [{"green": 1}]),
    "dict_literal_keys": (dict[Literal["a", "b"], int], [{"a": 1}], [{"c": 1}]),
    "dict_pattern_keys": (dict[Annotated[str, Field(pattern="^x-")], int], [{"x-a": 1}], [{"x-a": "b"}]),
    "dict_length_keys": (dict[Annotated[str, Field(min_length=2)], int], [{"ab": 1}], [{"a": 1}]),
    "dict_uuid_keys": (dict[uuid.UUID, int], [{U: 1}], [{"a": 1}]),
    "dict_date_keys": (dict[datetime.date, int], [{"2024-02-29": 1}], [{"a": 1}]),
    "TypedDict": (Options, [{"a": 1}, {"a": 1, "b": "c"}], [{"b": "c"}]),
    "dataclass": (Size, [{"width": 1}], [{}]),
    "model": (Point, [{"x": 1}, {"x": 1, "y": 2}], [{"y": 2}]),
    "closed_model": (Closed, [{"a": 1}], [{"a": 1, "b": 2}]),
    "open_model": (Open, [{"a": 1, "b": 2}], [{"b": 2}]),
    "recursive_model": (Node, [{"value": 1, "children": [{"value": 2}]}], [{"value": 1, "children": [{}]}]),
    "RootModel": (pydantic.RootModel[list[int]], [[1]], [["a"]]),
    "Optional": (Optional[int], [1, None], ["a"]),  # noqa: UP045
    "Union": (int | str, [1, "a"], [None]),
    "discriminated": (
        Annotated[Cat | Dog, Field(discriminator="kind")],
        [{"kind": "cat", "lives": 9}],
        [{"kind": "cat", "name": "a"}, {"kind": "cow"}],
    ),
    "IPv4Address": (ipaddress.IPv4Address, ["127.0.0.1"], ["256.0.0.1"]),
    "IPv6Address": (ipaddress.IPv6Address, ["2001:db8::1"], ["g::"]),
    "IPv4Network": (ipaddress.IPv4Network, ["10.0.0.0/8"], [1]),
    "IPv6Interface": (ipaddress.IPv6Interface, ["2001:db8::1/64"], [1]),
    "IPvAnyAddress": (networks.IPvAnyAddress, ["127.0.0.1"], [1]),
    "IPvAnyNetwork": (networks.IPvAnyNetwork, ["10.0.0.0/8"], [1]),
    "AnyUrl": (pydantic.AnyUrl, ["foo://a"], ["x y"]),
    "HttpUrl": (pydantic.HttpUrl, ["https://example.org/a?b=c"], ["x y"]),
    "FileUrl": (pydantic.FileUrl, ["file:///tmp/a"], ["x y"]),
    "PostgresDsn": (pydantic.PostgresDsn, ["postgresql://u:p@localhost:5432/db"], [1]),
    "RedisDsn": (pydantic.RedisDsn, ["redis://localhost:6379/0"], ["x y"]),
    "Json": (pydantic.Json[Any], ['{"a": 1}'], [1]),
    "JsonValue": (pydantic.JsonValue, [{"a": [1]}], []),
    "SecretStr": (pydantic.SecretStr, ["a"], [1]),
    "SecretBytes": (pydantic.SecretBytes, ["a"], [1]),
    "Secret": (pydantic.Secret[int], [1], ["a"]),
    "Base64Bytes": (pydantic.Base64Bytes, ["aGVsbG8="], [1]),
    "Base64Str": (pydantic.Base64Str, ["aGVsbG8="], [1]),
    "Base64UrlStr": (pydantic.Base64UrlStr, ["aGVsbG8="], [1]),
    "ByteSize": (pydantic.ByteSize, [1024, "1KiB"], ["x", None]),
    "PastDate": (pydantic.PastDate, ["2000-01-01"], ["2000-13-01"]),
    "FutureDatetime": (pydantic.FutureDatetime, ["9000-01-01T00:00:00Z"], ["2000-01-01"]),
    "AwareDatetime": (pydantic.AwareDatetime, ["2000-01-01T00:00:00Z"], ["2000-01-01"]),
    "type_alias": (Annotated[str, pydantic.AfterValidator(str.upper)], ["a"], [1]),
    "with_schema": (Annotated[Any, pydantic.WithJsonSchema({"type": "string", "format": "x"})], ["a"], [1]),
}
