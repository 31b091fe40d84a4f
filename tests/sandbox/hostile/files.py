"""Attacks on the folder of a call: its size, links out of it, and trees that are hard to remove."""

from asterism.sandbox.inside.call import run_code
from tests.sandbox.hostile.record import NEIGHBOUR_FOLDERS, hostile, printed, raised, read_programs, timed_out

# These programs print each successful escape, so they must print nothing.
_PRINT_EACH_ESCAPE = {
    "writes outside its folder": """
        import os, sys
        places = ['/', '/usr', '/usr/lib', '/usr/local', '/bin', '/dev', '/dev/shm/..', '/proc', '/sys', '/etc', '/run', '/var',
                  '/var/tmp', '/root', '/home', '/opt', '/opt/asterism', '/run/asterism', os.path.dirname(os.__file__),
                  os.path.dirname(sys.executable), *sys.path[1:], '..', '../..']
        for place in places:
            if os.path.samefile(place, '.') if os.path.exists(place) else True: continue
            for attempt in (
                lambda: open(f'{place}/hostile', 'w'),
                lambda: os.mkdir(f'{place}/hostile.d'),
                lambda: os.symlink('x', f'{place}/hostile.l'),
                lambda: os.mkfifo(f'{place}/hostile.p'),
                lambda: os.rename('/usr', f'{place}/hostile.r'),
            ):
                try: attempt(); print('wrote to', place)
                except OSError: pass
        """,
    "writes to the machine's temporary folders": """
        import os
        for place in ('/tmp', '/var/tmp', '/dev/shm', '/run/lock', '/run/user'):
            if os.path.realpath(place) == '/scratch/own-tmp': continue  # in the call's own file system
            if os.path.exists(place) and not os.path.samefile(place, '.'):
                try: open(f'{place}/hostile', 'w'); print('wrote to', place)
                except OSError: pass
        """,
    "changes files that all calls share": """
        import os, sys
        for attempt in (
            lambda: open(os.__file__, 'a'),
            lambda: open(sys.executable, 'r+b'),
            lambda: os.truncate(os.__file__, 0),
            lambda: os.chmod(os.__file__, 0o777),
            lambda: os.utime(os.__file__, (0, 0)),
            lambda: os.remove(os.__file__),
            lambda: os.chmod('/dev/null', 0),
            lambda: os.remove('/dev/null'),
            lambda: os.chmod('/', 0),
            lambda: os.setxattr(os.__file__, 'user.hostile', b'x'),
        ):
            try: attempt(); print('changed')
            except OSError: pass
        """,
    "reads and writes its neighbours' folders": f"""
        import os
        for folder in {NEIGHBOUR_FOLDERS}:
            try:
                if os.path.samefile(folder, '.'): continue
            except OSError: pass
            for attempt in (
                lambda: os.listdir(folder),
                lambda: open(folder + '/mine').read(),
                lambda: open(folder + '/hostile', 'w'),
                lambda: os.link(folder + '/mine', 'stolen'),
                lambda: os.rename(folder + '/mine', 'stolen'),
                lambda: os.remove(folder + '/mine'),
                lambda: (os.chdir(folder), os.listdir('.')),
            ):
                try: attempt(); print('reached', folder)
                except OSError: pass
        """,
    "links to files outside its folder": """
        import os
        for number, target in enumerate(('/etc/passwd', '/', '..', '/proc/self/mem', '/dev/shm/../..')):
            os.symlink(target, f'l{number}')
        for number, target in enumerate(('/etc/passwd', os.__file__, '/bin/sh', '/dev/null')):
            try: os.link(target, f'h{number}'); print('linked', target)
            except OSError: pass
        for name in ('l0', 'l1/etc/shadow', 'l2/../etc/passwd', 'l3'):
            try: open(name).read(); print('read', name)
            except (OSError, ValueError): pass
        for name in ('l1', 'l2'):
            try: open(f'{name}/hostile', 'w'); print('wrote', name)
            except OSError: pass
        """,
    "makes devices": """
        import os, stat
        for kind, device in ((stat.S_IFCHR, os.makedev(1, 1)), (stat.S_IFBLK, os.makedev(254, 0)), (stat.S_IFCHR, os.makedev(5, 1))):
            try: os.mknod('d', kind | 0o666, device); open('d', 'r+b'); print('made')
            except OSError: pass
        """,
    "holds locks and leases on files that all calls share": """
        import fcntl, os, sys, time
        files = [open(path, 'rb') for path in (os.__file__, sys.executable, '/dev/null')]
        for file in files:
            try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError: pass
            try: fcntl.fcntl(file, 1024, fcntl.F_WRLCK); print('leased')
            except OSError: pass
            try: fcntl.fcntl(file, 1024, fcntl.F_RDLCK); print('leased')
            except OSError: pass
        import json, random, string
        time.sleep(0.1)
        """,
    "leaves modules named like the harness's and the library's": f"""
        import os
        evil = "import os\\nos.write(1, b'evil ran')\\nraise SystemExit(9)"
        os.makedirs('asterism/sandbox/inside/call')
        os.mkdir('encodings')
        names = 'json random os sys io re struct numpy sitecustomize usercustomize encodings/__init__ asterism/__init__'
        names += ' asterism/sandbox/__init__ asterism/sandbox/inside/__init__ asterism/sandbox/inside/call/__init__'
        names += ' {run_code.__name__.replace(".", "/")}'
        for name in (names + ' traceback linecache string').split():
            open(f'{{name}}.py', 'w').write(evil)
        open('evil.pth', 'w').write("import os; os.write(1, b'evil ran')")
        """,
    "leaves start-up files for Python": """
        import os, subprocess, sys
        version = f'python{sys.version_info[0]}.{sys.version_info[1]}'
        folder = f"{os.environ['HOME']}/.local/lib/{version}/site-packages"
        os.makedirs(folder)
        open(f'{folder}/usercustomize.py', 'w').write("print('evil ran')")
        open(f'{folder}/evil.pth', 'w').write("import os; os.write(1, b'evil ran')")
        """,
}

_PROGRAMS = {
    "fills the disk": """
        # printed("28\\n")
        import os
        try:
            for number in range(100): open(f'f{number}', 'wb').write(b'x' * (1 << 20))
        except OSError as error: print(error.errno)
        """,
    "creates files without end": """
        # printed("28 True\\n")
        made = 0
        try:
            while made < 100_000:
                open(f'f{made}', 'w').close()
                made += 1
        except OSError as error: print(error.errno, made < 4096)
        """,
    "reserves space": """
        # printed("[27, 27]\\n")
        import os
        fd, refused = os.open('f', os.O_CREAT | os.O_RDWR), []
        for length in (1 << 40, 1 << 30):
            try: os.posix_fallocate(fd, 0, length)
            except OSError as error: refused.append(error.errno)
        print(refused)
        """,
    "keeps unlinked files": """
        # printed("28\\n")
        import os
        fds = []
        try:
            for _ in range(100):
                fds.append(os.open('f', os.O_CREAT | os.O_RDWR))
                os.unlink('f')
                os.write(fds[-1], b'x' * (1 << 20))
        except OSError as error: print(error.errno)
        """,
    "removes its folder": """
        # printed("True\\n"), timed_out()
        import os, shutil
        folder = os.getcwd()
        for attempt in (lambda: os.rmdir(folder), lambda: os.rename(folder, folder + 'x'), lambda: shutil.rmtree('/', True)):
            try: attempt()
            except OSError: pass
        print(os.path.isdir(folder))
        """,
    "makes its folder unreadable": """
        # printed("ok\\n")
        import os
        os.makedirs('a/b/c')
        open('a/b/f', 'w').close()
        for name in ('a/b/c', 'a/b', 'a', '.'): os.chmod(name, 0)
        print('ok')
        """,
    "makes a tree that is deeper than a path is long": """
        # ok()
        import os
        try:
            for _ in range(1500):
                os.mkdir('d' * 50)
                os.chdir('d' * 50)
        except OSError as error: print(error.errno)
        """,
    "creates files with invalid names": r"""
        # printed("16\n")
        import os
        for name in (b'\xff\xfe', b'a\nb', b'\x1b[2J', b'-rf *', b' ', b'\xed\xa0\x80', b'"\\', b'x' * 255):
            open(name, 'w').close()
            os.mkdir(b'd' + name[:254])
        print(len(os.listdir()))
        """,
}

FILES = [
    *read_programs(_PROGRAMS),
    hostile("writes a huge file", "open('f', 'wb').write(b'x' * (9 << 20))", raised("OSError: [Errno 27]")),
    hostile("makes a file with a hole", "open('f', 'wb').truncate(1 << 40)", raised("OSError: [Errno 27]")),
    *[hostile(name, code, printed("")) for name, code in _PRINT_EACH_ESCAPE.items()],
    hostile(
        "links in a circle",
        "import os\nos.symlink('b', 'a')\nos.symlink('a', 'b')\nos.symlink('.', 'c')\nopen('/'.join('c' * 30) + '/f', 'w')\nopen('a')",
        raised("OSError: [Errno 40]"),
    ),
    hostile("waits for a named pipe without a writer", "import os\nos.mkfifo('p')\nopen('p').read()", timed_out("")),
    hostile(
        "waits for a lock on a file that its child holds",
        "import fcntl, os\nopen('f', 'w').close()\nread, write = os.pipe()\nchild = os.fork()\n"
        "file = open('f', 'r+')\n"
        "if child == 0: fcntl.lockf(file, fcntl.LOCK_EX); os.write(write, b'x'); os.read(read, 2)\n"
        "os.read(read, 1)\nfcntl.lockf(file, fcntl.LOCK_EX)",
        timed_out(""),
    ),
]
