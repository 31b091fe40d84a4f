"""Attacks that read foreign data: environment, /proc, /sys, the machine's files, other calls' data.

The arena searches the output of every program for the executor's secrets.
"""

from asterism.sandbox.inside.server.call_process_handle import CallProcess, OutputPipe
from asterism.sandbox.inside.server.fork_server import ForkServer
from asterism.sandbox.inside.wire.frames import FrameReader
from tests.sandbox.hostile.record import NEIGHBOUR_FOLDERS, NEIGHBOURS, SECRET_FILE, hostile, printed, read_programs

_EXPECTED_ENVIRONMENT = (
    "['HOME', 'LC_ALL', 'MKL_NUM_THREADS', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'PYTHONHASHSEED', "
    "'PYTHONUTF8', 'TMPDIR']\n"
)
_CONTAINERS = tuple(kind.__name__ for kind in (CallProcess, ForkServer, OutputPipe, FrameReader))

# These programs print a list of the foreign data that they can read; the list must be empty.
_LIST_FOREIGN_DATA = {
    "reads the environment, arguments and memory of processes": f"""
        import os
        read = []
        for pid in ('1', '2', *{NEIGHBOURS}):
            for name in ('environ', 'cmdline', 'maps', 'mem', 'status', 'stat', 'fd', 'root', 'cwd', 'mountinfo', 'task'):
                path = f'/proc/{{pid}}/{{name}}'
                try: os.listdir(path); read.append(path)
                except OSError: pass
                try: print(open(path, 'rb').read(4096)); read.append(path)
                except OSError: pass
        print(read)
        """,
    "reads the kernel's files": """
        import os
        read = []
        for path in ('/proc', '/proc/mounts', '/proc/kcore', '/proc/kallsyms', '/proc/kmsg', '/proc/net/tcp', '/proc/net/unix',
                     '/proc/cmdline', '/proc/version', '/proc/meminfo', '/proc/keys', '/proc/sysvipc/shm', '/proc/sysrq-trigger',
                     '/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', '/sys', '/sys/class/net', '/sys/fs/cgroup',
                     '/sys/kernel', '/sys/firmware', '/sys/kernel/debug', '/dev/mem', '/dev/kmsg', '/dev/kvm', '/dev/tty',
                     '/dev/console', '/dev/ptmx', '/dev/vda', '/dev/sda', '/dev/fuse', '/dev/net/tun', '/dev/userfaultfd'):
            try: found = os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1)
            except OSError: continue
            if found: read.append(path)
        print(read)
        """,
    "reads the machine's files": f"""
        import os
        import sys
        read, python = [], (sys.base_prefix, *sys.path)  # which may lie beneath /root
        for path in ('/etc/passwd', '/etc/shadow', '/etc/hostname', '/etc', '/root', '/home', '/var/log', '/boot', '/mnt',
                     '/run', '/srv', '/var/run/docker.sock', '/run/asterism', '/run/asterism/executor.sock', {SECRET_FILE!r}):
            try: found = os.listdir(path) if os.path.isdir(path) else open(path).read()
            except OSError: continue
            if found and not any(place.startswith(path + '/') for place in python): read.append((path, found))
        print(read)
        """,
    "asks which of the machine's files exist": f"""
        import os, sys
        python = (sys.base_prefix, *sys.path)  # which may lie beneath /root
        paths = ['/etc', '/home', '/root', '/sys/class', '/proc/1', '/run', {SECRET_FILE!r}, *{NEIGHBOUR_FOLDERS}]
        paths = [path for path in paths if not any(place.startswith(path + '/') for place in python)]
        print([path for path in paths if os.path.exists(path) and not os.path.samefile(path, '.')])
        """,
    "searches for its neighbours' folders": """
        import os
        found = []
        for folder in ('..', '../..', '/tmp', '/dev/shm', '/scratch'):
            try: found += [f'{folder}/{name}' for name in os.listdir(folder)]
            except OSError: pass
        print([path for path in found if os.path.exists(path + '/mine') and not os.path.samefile(path, '.')])
        """,
    "reads other calls' data from inherited objects": f"""
        import gc, sys
        marker = ' '.join(['secret', 'of', 'a', 'neighbour'])  # part of the neighbour's code, input and output
        seen, found, todo = set(), [], [*gc.get_objects(), *sys.modules.values()]
        frame = sys._getframe()
        while frame: todo += [frame.f_locals, frame.f_globals]; frame = frame.f_back
        while todo:
            thing = todo.pop()
            if id(thing) in seen: continue
            seen.add(id(thing))
            if isinstance(thing, (str, bytes, bytearray)):
                text = thing if isinstance(thing, str) else bytes(thing).decode('latin-1')
                if marker in text and thing is not marker: found.append(text[:100])
            elif type(thing) in (list, tuple, dict, set) or type(thing).__name__ in ('deque', *{_CONTAINERS}):
                todo += gc.get_referents(thing)
        print(found)
        """,
}

_PROGRAMS = {
    "reads the environment with which the interpreter was started": f"""
        # printed({_EXPECTED_ENVIRONMENT!r})
        import ctypes
        environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')
        number, names = 0, []
        while environ[number]:
            names.append(environ[number].split(b'=')[0].decode())
            number += 1
        print(sorted(names))
        """,
    "reads the arguments": """
        # printed("['']\\n")
        import sys
        print(sys.argv)
        print('asterism_executor' in ' '.join(sys.orig_argv), len(sys.orig_argv) < 12, file=sys.stderr)
        print(sys.orig_argv, file=sys.stderr)
        """,
    "searches for other processes": """
        # printed("[]\\n"), forms=("program",)  # a cell finds the other processes of its notebook
        import os
        found = []
        for pid in range(2, 4000):
            for ask in (lambda: os.getpgid(pid), lambda: os.getsid(pid), lambda: os.sched_getaffinity(pid),
                        lambda: os.getpriority(os.PRIO_PROCESS, pid), lambda: os.pidfd_open(pid)):
                try: ask()
                except OSError: continue
                found.append(pid)
        print(sorted(set(found) - {os.getpid()}))
        """,
    "reads other calls' data from inherited memory": """
        # printed("[] True\\n"), timed_out("")
        import ctypes, os, re
        libc = ctypes.CDLL(None)
        libc.sbrk.restype = ctypes.c_void_p
        libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
        secret = re.compile(rb'secre[t] of a neighbou[r]')  # does not match its own source
        read, write = os.pipe()
        found, pages = [], 0
        for middle in (libc.sbrk(0), id(object()), id(bytes(1 << 10))):
            first = middle // 4096 * 4096 - (8 << 20)
            for page in range(first, first + (16 << 20), 4096):
                if libc.write(write, page, 4096) == 4096:  # fails for unmapped pages
                    pages += 1
                    found += secret.findall(os.read(read, 4096))
        print(found, pages > 500)
        """,
}

SNOOPING = [
    *read_programs(_PROGRAMS),
    hostile("reads the environment", "import os\nprint(sorted(os.environ))", printed(_EXPECTED_ENVIRONMENT)),
    *[hostile(name, code, printed("[]\n")) for name, code in _LIST_FOREIGN_DATA.items()],
]
