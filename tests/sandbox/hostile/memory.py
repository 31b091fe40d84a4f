"""Attacks on memory and CPU: blocks, maps, pipes, sockets, large numbers, patterns."""

from tests.sandbox.hostile.record import (
    any_outcome,
    hostile,
    ok,
    out_of_memory,
    printed,
    raised,
    read_programs,
    timed_out,
)

_PROGRAMS = {
    "takes memory again and again": """
        # timed_out(""), out_of_memory()
        blocks = []
        while True:
            try: blocks.append(bytearray(1 << 20))
            except MemoryError: pass
        """,
    "maps shared memory": """
        # printed("-1 1\\n-1 1\\n-1 1\\n")
        import ctypes, mmap, os
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        for kind in (mmap.MAP_SHARED, 3, mmap.MAP_SHARED | 0x4000):  # 3: MAP_SHARED_VALIDATE; MAP_NORESERVE
            print(libc.mmap(None, 1 << 20, 3, kind | mmap.MAP_ANONYMOUS, -1, 0), ctypes.get_errno())
        """,
    "maps the zero device as shared memory": """
        # printed("b'\\\\x00\\\\x00'\\n")
        import mmap, os
        try: print(mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20))
        except PermissionError: print(os.read(os.open('/dev/zero', os.O_RDONLY), 2))
        """,
    "keeps memory in files outside its folder": """
        # printed("[]\\n")
        import os
        own, files = (os.getcwd(), '/scratch/own-tmp'), []  # one file system
        for folder in ('/', '/dev', '/dev/shm', '/dev/mqueue', '/dev/hugepages', '/tmp', '/var/tmp', '/run', '/scratch', '/proc'):
            if os.path.realpath(folder) in own: continue
            for flags in (os.O_CREAT, os.O_TMPFILE):
                try: files.append(os.open(folder if flags == os.O_TMPFILE else folder + '/hostile', flags | os.O_RDWR))
                except OSError: pass
        print(files)
        """,
    "keeps memory in memfds": """
        # printed("1\\n0 -1\\n")
        import ctypes, os
        held = 0
        try:
            while held < 300:
                fd = os.memfd_create('hostile')
                for _ in range(3): os.write(fd, b'x' * (1 << 20))
                held += 3
        except OSError as error: print(error.errno)
        print(held, ctypes.CDLL(None).syscall(447, 0))
        """,
    "keeps memory in pipes": """
        # printed("24 True\\n")
        import fcntl, os
        held = 0
        try:
            while True:
                read, write = os.pipe()
                os.set_blocking(write, False)
                try: print(fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20))
                except PermissionError: pass
                try:
                    while True: held += os.write(write, b'x' * 65536)
                except BlockingIOError: pass
        except OSError as error: print(error.errno, held <= 256 << 20)
        """,
    "keeps memory in sockets": """
        # printed("24 True\\n")
        import os, socket
        held, pairs = 0, []
        try:
            while True:
                pairs.append(socket.socketpair())
                pairs[-1][0].setblocking(False)
                try: pairs[-1][0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30); print('larger')
                except PermissionError: pass
                try:
                    while True: held += pairs[-1][0].send(b'x' * 65536)
                except BlockingIOError: pass
        except OSError as error: print(error.errno, held <= 256 << 20)
        """,
    "locks bytes of a file without end": """
        # out_of_memory()
        import fcntl
        file = open('f', 'w')
        for start in range(0, 1 << 40, 2): fcntl.lockf(file, fcntl.LOCK_EX, 1, start)
        """,
    "keeps memory in the sockets of many processes": """
        # out_of_memory()
        import os, socket, time
        for _ in range(12):
            if not os.fork(): break
        pairs = []
        try:
            while True:
                pairs += socket.socketpair()
                pairs[-1].setblocking(False)
                pairs[-2].setblocking(False)
                for end in pairs[-2:]:
                    try:
                        while True: end.send(b'x' * 65536)
                    except BlockingIOError: pass
        except OSError: time.sleep(60)
        """,
    "locks memory": """
        # printed("-1 -1\\n")
        import ctypes
        libc = ctypes.CDLL(None)
        block = ctypes.create_string_buffer(1 << 20)
        print(libc.mlock(block, 1 << 20), libc.mlockall(3))
        """,
    "makes event descriptors, epolls and watches": """
        # printed("-1 -1 -1\\n")
        import ctypes, os, select
        libc, polls = ctypes.CDLL(None), []
        try:
            for _ in range(60):
                os.eventfd(0)
                polls.append(select.epoll())
        except OSError: pass
        print(libc.inotify_init(), libc.inotify_init1(0), libc.fanotify_init(0, 0))
        """,
}

MEMORY = [
    *read_programs(_PROGRAMS),
    hostile("takes memory", "blocks = []\nwhile True: blocks.append(bytearray(1 << 20))", out_of_memory()),
    hostile("takes memory at once", "block = [0] * (1 << 40)", out_of_memory()),
    hostile(
        "maps anonymous memory",
        "import mmap\nmmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)",
        raised("OSError: [Errno 12]"),
    ),
    hostile(
        "creates System V shared memory and message queues",
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print(libc.shmget(1, 4096, 0o1777), libc.semget(1, 1, 0o1777), libc.msgget(1, 0o1777), libc.mq_open(b'/hostile', 66, 0o777, None))",
        printed("-1 -1 -1 -1\n"),
    ),
    hostile(
        "opens all descriptors",
        "import os\ntry:\n    while True: os.open('.', os.O_RDONLY)\nexcept OSError as error: print(error.errno)",
        printed("24\n"),
    ),
    hostile(
        "unpacks a bomb",
        "import zlib\npacker = zlib.compressobj()\npacked = b''.join(packer.compress(bytes(1 << 20)) for _ in range(200))"
        " + packer.flush()\nzlib.decompress(packed)",
        out_of_memory(),
        timed_out(""),
    ),
    hostile("computes a number that is too large", "print(9 ** 9 ** 9)", timed_out(""), out_of_memory()),
    hostile("prints a number that is too long", "print(10 ** 5000)", raised("ValueError: Exceeds the limit")),
    hostile(
        "prints a number that is too long, with the limit off",
        "import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(7 ** 10_000_000)))",
        timed_out(""),
    ),
    hostile("matches a pattern with exponential cost", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", timed_out("")),
    hostile("formats a huge string", "'%1000000000d' % 1", out_of_memory(), timed_out("")),
    hostile(
        "grows by unpickling",
        "import pickle\npickle.loads(b'\\x8c\\x01x' + b'2\\x86' * 100_000 + b'.')",
        *any_outcome(),
    ),
    hostile(
        "frees a deep chain of references",
        "chain = None\nfor _ in range(300_000): chain = (chain,)\ndel chain\nprint('ok')",
        printed("ok\n"),
    ),
    hostile(
        "burns processor time in many processes",
        "import os\nfor _ in range(3): os.fork()\nwhile True: pass",
        timed_out(""),
    ),
    hostile("runs almost up to the limit", "import time\ntime.sleep(0.2)\nprint('ok')", ok()),
]
