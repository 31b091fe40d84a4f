"""Shared files pass no bits between calls: a receiver gets the same result with and without a sender."""

import subprocess
import sys
from typing import NamedTuple

import pytest

from asterism.bus.messages import CodeOk, CodeOutcome, CodeRaised
from tests.sandbox.conftest import Client

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
LIMITS = {"time_limit_s": 8.0, "spare_notebooks": 2}
FILES = (
    *("os.__file__", "'/usr'", "'/'", "'/dev'", "'/dev/null'", "'/dev/full'", "'/dev/zero'", "'/dev/random'"),
    "'/dev/urandom'",
)
PREAMBLE = """
import fcntl, mmap, os, socket, struct, time
def attempt(action):
    try: return action()
    except OSError as error: return error.errno
def lock(kind, start=0, length=0, pid=0): return struct.pack("hhqqi4x", kind, 0, start, length, pid)
flags = next(flags for flags in (os.O_RDWR, os.O_RDONLY) if attempt(lambda: os.close(os.open(path, flags))) is None)
fd = os.open(path, flags)
"""


class Channel(NamedTuple):
    send: str  # code of a notebook whose processes then hold the locks
    receive: str  # expression whose value is the receiver's result


_LOCK_KINDS = "(fcntl.F_RDLCK, fcntl.F_WRLCK)"
_TRY_LOCKS = f"[attempt(lambda: fcntl.fcntl(fd, fcntl.F_SETLK, lock(kind)) and 0) for kind in {_LOCK_KINDS}]"
_LOCK = f"for kind in {_LOCK_KINDS}: attempt(lambda: fcntl.fcntl(fd, fcntl.F_SETLK, lock(kind, 5, 1)))"
CHANNELS = {
    "locks that F_GETLK shows": Channel(
        _LOCK, f"[attempt(lambda: fcntl.fcntl(fd, fcntl.F_GETLK, lock(kind))) for kind in {_LOCK_KINDS}]"
    ),
    "locks that conflict": Channel(_LOCK, _TRY_LOCKS),
    "locks of an open file": Channel(
        f"for kind in {_LOCK_KINDS}: attempt(lambda: fcntl.fcntl(fd, 37, lock(kind)))",
        f"[attempt(lambda: fcntl.fcntl(fd, command, lock(kind))) for command in (36, 37) for kind in {_LOCK_KINDS}]",
    ),
    "flock": Channel(
        "attempt(lambda: fcntl.flock(fd, fcntl.LOCK_EX))",
        "[attempt(lambda: fcntl.flock(fd, kind | fcntl.LOCK_NB)) for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX)]",
    ),
    "leases": Channel(
        "for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK): attempt(lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, kind))",
        "[attempt(lambda: fcntl.fcntl(fd, fcntl.F_GETLEASE))]",
    ),
    "times": Channel(
        "for times in (None, (1, 1)): attempt(lambda: os.utime(path, times)); attempt(lambda: os.utime(fd, times))\n"
        "attempt(lambda: os.read(fd, 1) if os.path.isfile(path) else os.listdir(path))\n"
        "attempt(lambda: os.write(fd, b'x')) if path.startswith('/dev/') else 0",
        "[os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns, os.stat(path).st_ctime_ns]",
    ),
    "modes, owners and attributes": Channel(
        "attempt(lambda: os.chmod(path, 0o777)), attempt(lambda: os.chown(path, os.getuid(), os.getgid()))\n"
        "attempt(lambda: os.setxattr(path, 'user.bit', b'1'))",
        "[tuple(os.stat(path))[:7], attempt(lambda: os.listxattr(path))]",
    ),
    "names": Channel(
        "attempt(lambda: os.link(path, '/usr/bit')), attempt(lambda: os.symlink(path, '/scratch/bit'))\n"
        "attempt(lambda: os.mkdir('/dev/bit')), attempt(lambda: open('/bit', 'w'))",
        "[os.stat(path).st_nlink, *sorted(os.listdir('/') + os.listdir('/scratch') + os.listdir('/dev') + os.listdir('/usr'))]",
    ),
    "notifications": Channel(
        "attempt(lambda: os.read(fd, 1))", "[attempt(lambda: fcntl.fcntl(fd, fcntl.F_NOTIFY, fcntl.DN_ACCESS))]"
    ),
    "positions of descriptors": Channel(
        "attempt(lambda: os.lseek(fd, 7, os.SEEK_SET))", "[attempt(lambda: os.lseek(fd, 0, os.SEEK_CUR))]"
    ),
    "writable shared mappings": Channel(
        "attempt(lambda: mmap.mmap(fd, 4096).__setitem__(0, 1))",
        "[attempt(lambda: mmap.mmap(fd, 4096, prot=mmap.PROT_READ)[0])]",
    ),
}


def get_text(outcome: CodeOutcome) -> str:
    assert isinstance(outcome, CodeOk | CodeRaised), outcome
    return outcome.output.stdout + (outcome.error if isinstance(outcome, CodeRaised) else "")


@pytest.mark.parametrize("channel", CHANNELS)
async def test_a_shared_file_passes_no_bit_to_another_call(client: Client, channel: str) -> None:
    send, receive = CHANNELS[channel]
    for number, file in enumerate(FILES):
        begin = f"import os\npath = {file}" + PREAMBLE
        reader = begin + f"print({receive})"
        before = get_text((await client.program(reader)).outcome)
        sent = (await client.cell(begin + send, 100 + number)).outcome
        assert get_text(sent) == "" or "Error" not in get_text(sent), file
        assert get_text((await client.program(reader)).outcome) == before, file
        assert before.startswith("["), before


ASK_FOR_LOCKS = """
import fcntl, os, struct
def ask(kind, *rest):
    question = struct.pack("hhqqi4x", kind, *rest, 0)
    kind, *place, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, question))
    return kind, place, pid in (owner, 0) and bool(pid)
owner = os.getpid()
fd = os.open("locked", os.O_RDWR | os.O_CREAT)
os.write(fd, bytes(100))
fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20)
fcntl.lockf(fd, fcntl.LOCK_SH, 0, 90)
print(ask(fcntl.F_WRLCK, 0, 0, 0))
if not os.fork():
    for whence, start, length in ((0, 0, 0), (0, 0, 20), (0, 29, 1), (0, 30, -1), (0, 20, -5), (1, -71, 1), (1, -70, 1), (2, -75, 0)):
        print([ask(kind, whence, start, length) for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK)])
    try: ask(7, 0, 0, 0)
    except OSError as error: print(error)
    try: ask(fcntl.F_RDLCK, 0, -5, 1)
    except OSError as error: print(error)
    os._exit(0 * print(end="", flush=True))
os.wait()
"""


async def test_lock_queries_about_own_files_get_the_answers_of_the_kernel(
    client: Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plain")
    plain = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", ASK_FOR_LOCKS], cwd=folder, capture_output=True, text=True, check=True
    )
    assert plain.stdout.count("\n") == 11
    assert get_text((await client.program(ASK_FOR_LOCKS)).outcome) == plain.stdout


SQLITE = """
import os, sqlite3
journal = sqlite3.connect("journal.db", isolation_level=None)
journal.execute("create table numbers(x)")
journal.execute("insert into numbers values (1)")
if not os.fork():  # dies in a transaction, and leaves a journal
    writer = sqlite3.connect("journal.db", isolation_level=None)
    writer.execute("pragma cache_size=2")
    writer.execute("begin")
    writer.executemany("insert into numbers values (?)", [(bytes(3000),) for _ in range(100)])
    os._exit(0)
os.wait()
print(os.path.exists("journal.db-journal"), sqlite3.connect("journal.db").execute("select count(*) from numbers").fetchall())
log = sqlite3.connect("log.db")
print(log.execute("pragma journal_mode=wal").fetchone())
log.execute("create table numbers(x)")
log.execute("insert into numbers values (2)")
log.commit()
if not os.fork():
    print(sqlite3.connect("log.db").execute("select * from numbers").fetchall(), flush=True)
    os._exit(0)
os.wait()
"""


async def test_sqlite_recovers_journals_and_keeps_write_ahead_logs(client: Client) -> None:
    assert get_text((await client.program(SQLITE)).outcome) == "True [(1,)]\n('wal',)\n[(2,)]\n"
