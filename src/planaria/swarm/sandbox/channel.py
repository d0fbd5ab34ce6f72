"""Messages between an untrusted program and its tests, which run in two processes. Part of ``process.py``.

Plain values are copied: numbers, texts, bytes, lists, tuples, dictionaries, sets, and names of built-in types. Other
values stay in the program's process and are sent as a number, which the tests see as :class:`RemoteObject`. No method
of the program decides whether two values are equal.

A value is encoded as one letter for its type, a length, and that many bytes or values. The ``json`` module takes longer
to import than most programs run, and unpickling untrusted data is unsafe.
"""

from __future__ import annotations

import builtins
import os
import struct
import sys

TYPE_CHECKING = False  # typing's own takes as long to import as the rest of the sandbox
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

HEAD = struct.Struct("<cI")
FLOAT = struct.Struct("<d")
MAX_MESSAGE_BYTES = 4 << 20
"""maximum bytes of one message"""
TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}
GROUPS: dict[bytes, Callable[[list[Any]], Any]] = {b"l": list, b"t": tuple, b"S": set, b"F": frozenset}
LETTERS: dict[type[Any], bytes] = {list: b"l", tuple: b"t", set: b"S", frozenset: b"F"}


def pack(value: Any, keep: Callable[[Any], int]) -> bytes:
    """Return ``value`` as bytes. ``keep`` returns a number for a value that is not plain, or raises TypeError."""
    if value is None or isinstance(value, bool):
        return _leaf(b"n", b"" if value is None else b"1" if value else b"0")
    if isinstance(value, int):
        return _leaf(b"i", hex(value).encode())
    if isinstance(value, float):
        return _leaf(b"f", FLOAT.pack(value))
    if isinstance(value, str):
        return _leaf(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray):
        return _leaf(b"b", bytes(value))
    for kind, letter in LETTERS.items():
        if isinstance(value, kind):
            return _node(letter, [pack(one, keep) for one in value])
    if isinstance(value, dict):
        return _node(b"d", [pack(part, keep) for pair in value.items() for part in pair])
    if isinstance(value, complex):
        return _leaf(b"c", FLOAT.pack(value.real) + FLOAT.pack(value.imag))
    if isinstance(value, range):
        return _node(b"r", [pack(part, keep) for part in (value.start, value.stop, value.step)])
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return _leaf(b"y", value.__name__.encode())
    for letter, module, name in ((b"D", "decimal", "Decimal"), (b"Q", "fractions", "Fraction")):
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
            return _leaf(letter, str(value).encode())
    return _leaf(b"h", hex(keep(value)).encode())


def unpack(data: bytes, find: Callable[[int], Any]) -> Any:
    """Decode :func:`pack`. ValueError, TypeError, LookupError or ArithmeticError for malformed data."""
    value, end = _read(data, 0, find)
    if end != len(data):
        raise ValueError("not a valid sandbox message")
    return value


def _leaf(letter: bytes, data: bytes) -> bytes:
    return HEAD.pack(letter, len(data)) + data


def _node(letter: bytes, parts: list[bytes]) -> bytes:
    return HEAD.pack(letter, len(parts)) + b"".join(parts)


def _read(data: bytes, offset: int, find: Callable[[int], Any]) -> tuple[Any, int]:
    """Return the value at an offset and the offset behind it."""
    if offset + HEAD.size > len(data):
        raise ValueError("not a valid sandbox message")
    letter, length = HEAD.unpack_from(data, offset)
    offset += HEAD.size
    if length > len(data) - offset:
        raise ValueError("not a valid sandbox message")
    if letter in GROUPS or letter in b"dr":
        parts = []
        for _ in range(length):
            part, offset = _read(data, offset, find)
            parts.append(part)
        if letter == b"d":
            return dict(zip(parts[::2], parts[1::2], strict=True)), offset
        return (range(*parts) if letter == b"r" else GROUPS[letter](parts)), offset
    return _plain(letter, data[offset : offset + length], find), offset + length


def _plain(letter: bytes, text: bytes, find: Callable[[int], Any]) -> Any:
    match letter:
        case b"n":
            return {b"": None, b"0": False, b"1": True}[text]
        case b"i":
            return int(text, 16)
        case b"f":
            return FLOAT.unpack(text)[0]
        case b"s":
            return text.decode("utf-8", "surrogatepass")
        case b"b":
            return text
        case b"c":
            return complex(*struct.unpack("<2d", text))
        case b"y":
            return TYPES[text.decode()]
        case b"D":
            from decimal import Decimal

            return Decimal(text.decode())
        case b"Q":
            from fractions import Fraction

            return Fraction(text.decode())
        case b"h":
            return find(int(text, 16))
    raise ValueError("not a valid sandbox message")


def reject_object(value: Any) -> int:
    """Reject values that are not plain."""
    raise TypeError(f"a {type(value).__name__} cannot cross")


def read_exactly(file: int, count: int) -> bytes:
    """Read ``count`` bytes from a descriptor. EOFError if it ends earlier."""
    data = b""
    while len(data) < count:
        piece = os.read(file, count - len(data))
        if not piece:
            raise EOFError("the input ended early")
        data += piece
    return data


class Pipe:
    """Message channel to the other process."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing

    def send(self, *message: Any, keep: Callable[[Any], int] = reject_object) -> None:
        """Send one message. ValueError if it is too long; BrokenPipeError if the other process has exited."""
        text = pack(message, keep)
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of more than {MAX_MESSAGE_BYTES} bytes")
        data = memoryview(HEAD.pack(b"m", len(text)) + text)
        while data:
            data = data[os.write(self._writing, data) :]

    def receive(self, find: Callable[[int], Any]) -> tuple[Any, ...]:
        """Receive one message. EOFError if the other process has exited; errors of :func:`unpack` if malformed."""
        _, length = HEAD.unpack(read_exactly(self._reading, HEAD.size))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of more than {MAX_MESSAGE_BYTES} bytes")
        result = unpack(read_exactly(self._reading, length), find)
        if not isinstance(result, tuple):
            raise ValueError("not a valid sandbox message")
        return result

    def receive_failure(self) -> str:
        """Receive the other process's error; empty if it succeeded."""
        (failure,) = self.receive(lambda number: number)
        return str(failure)

    def close(self) -> None:
        """Close the sending end and wait until the other process has exited."""
        os.close(self._writing)
        while os.read(self._reading, 1 << 16):
            pass


class RemoteObject:
    """Proxy of an object in the program's process: callable, indexable and iterable.

    Two proxies are equal if they are the same object. A proxy has no truth value: tests compare plain values only.
    """

    def __init__(self, far: RemoteProgram, number: int) -> None:
        self.__program, self.__number = far, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__program.ask("part", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__program.ask("call", self, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.__program.ask("item", self, key)

    def __len__(self) -> int:
        result = self.__program.ask("len", self)
        if type(result) is not int:
            raise TypeError("a length is a number")
        return result

    def __iter__(self) -> Iterator[Any]:
        walk = self.__program.ask("walk", self)
        while (result := self.__program.ask("next", walk)) != ():
            (one,) = result
            yield one

    def __bool__(self) -> bool:
        raise TypeError("an object of the program has no truth value here")


class RemoteProgram:
    """The program's process as seen by its tests."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._objects = pipe, dict[int, RemoteObject]()
        self._numbers = dict[int, int]()

    def ask(self, request: str, *about: Any) -> Any:
        """Return the program's reply; its exceptions are raised here as built-in exceptions."""
        self._pipe.send(request, *about, keep=self._number_of)
        how, *reply = self._pipe.receive(self._object)
        if how == "value":
            return reply[0]
        name, why = map(str, reply)
        kind: Any = getattr(builtins, name, None)
        real = isinstance(kind, type) and issubclass(kind, Exception)
        raise kind(why) if real else RuntimeError(f"{name}: {why}")

    def _object(self, number: int) -> RemoteObject:
        if number not in self._objects:
            self._objects[number] = RemoteObject(self, number)
            self._numbers[id(self._objects[number])] = number
        return self._objects[number]

    def _number_of(self, value: Any) -> int:
        if type(value) is not RemoteObject:
            raise TypeError(f"tests cannot hand over a {type(value).__name__}")
        return self._numbers[id(value)]


def serve(pipe: Pipe, names: dict[str, Any]) -> None:
    """Answer requests of the tests about a program's ``names`` until they close the channel."""
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def keep(value: Any) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    while True:
        try:
            request, *about = pipe.receive(objects.__getitem__)
        except EOFError:
            return
        try:
            pipe.send("value", _answer(request, names, *about), keep=keep)
        except BrokenPipeError:
            return
        except BaseException as error:
            pipe.send("raised", type(error).__name__, _message(error))


def _answer(request: str, names: dict[str, Any], on: Any, *about: Any) -> Any:
    match request:
        case "name":
            if on not in names:
                raise NameError(f"name {on!r} is not defined")
            return names[on]
        case "call":
            args, kwargs = about
            return on(*args, **kwargs)
        case "part":
            return getattr(on, about[0])
        case "item":
            return on[about[0]]
        case "len":
            return len(on)
        case "walk":
            return iter(on)
        case "next":
            return next(((one,) for one in on), ())
    raise ValueError(f"unknown request: {request}")


def _message(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:
        return "an exception without a message"
