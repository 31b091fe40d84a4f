"""Denied system calls: one program per system call, which must fail with EPERM."""

from asterism.sandbox.inside.isolation.allowed_syscalls import CALL_SYSCALLS
from tests.sandbox.hostile.record import Hostile, died, hostile, printed, read_programs

# By name: number on x86-64, number on arm64, and arguments with an effect if the call is not denied.
_REFUSED = {
    "ptrace": (101, 117, "0, 0, 0, 0"),  # PTRACE_TRACEME
    "process_vm_readv": (310, 270, "1, vector, 1, vector, 1, 0"),
    "process_vm_writev": (311, 271, "1, vector, 1, vector, 1, 0"),
    "process_madvise": (440, 440, "0, vector, 1, 4, 0"),
    "pidfd_getfd": (438, 438, "0, 0, 0"),
    "kcmp": (312, 272, "1, 1, 0, 0, 0"),
    "io_uring_setup": (425, 425, "8, block"),
    "io_uring_enter": (426, 426, "0, 1, 1, 0, 0, 0"),
    "io_uring_register": (427, 427, "0, 0, 0, 0"),
    "io_setup": (206, 0, "8, block"),
    "add_key": (248, 217, "b'user', b'hostile', b'x', 1, -3"),
    "request_key": (249, 218, "b'user', b'hostile', 0, -3"),
    "keyctl": (250, 219, "0, -3, 1"),
    "userfaultfd": (323, 282, "1"),
    "bpf": (321, 280, "0, block, 64"),
    "perf_event_open": (298, 241, "block, 0, -1, -1, 0"),
    "fanotify_init": (300, 262, "0, 0"),
    "name_to_handle_at": (303, 264, "-100, b'.', block, block, 0"),
    "open_by_handle_at": (304, 265, "-100, block, 0"),
    "init_module": (175, 105, "block, 64, b''"),
    "finit_module": (313, 273, "0, b'', 0"),
    "delete_module": (176, 106, "b'hostile', 0"),
    "kexec_load": (246, 104, "0, 0, 0, 0"),
    "reboot": (169, 142, "0xfee1dead, 672274793, 0, 0"),  # CAD_OFF is harmless if the call is not denied
    "syslog": (103, 116, "3, block, 64"),
    "acct": (163, 89, "0"),
    "swapon": (167, 224, "b'hostile', 0"),
    "quotactl": (179, 60, "0x800000, 0, 0, 0"),
    "settimeofday": (164, 170, "block, 0"),
    "clock_settime": (227, 112, "0, block"),
    "adjtimex": (159, 171, "block"),
    "sethostname": (170, 161, "b'hostile', 7"),
    "setdomainname": (171, 162, "b'hostile', 7"),
    "personality": (135, 92, "0x0040000"),
    "a user namespace": (272, 97, "0x10000000"),
    "a pid namespace": (272, 97, "0x20000000"),
    "a mount namespace": (272, 97, "0x20000"),
    "a network namespace": (272, 97, "0x40000000"),
    "an unshared file table": (272, 97, "0x400"),
    "core scheduling": (157, 167, "62, 1, 0, 0, 0"),  # PR_SCHED_CORE_CREATE
    "setns": (308, 268, "0, 0"),
    "a clone in a user namespace": (56, 220, "0x10000011, 0, 0, 0, 0"),
    "a clone in a pid namespace": (56, 220, "0x20000011, 0, 0, 0, 0"),
    "a clone in a control group's namespace": (56, 220, "0x2000011, 0, 0, 0, 0"),
    "a mount": (165, 40, "b'none', b'.', b'tmpfs', 0, 0"),
    "a remount": (165, 40, "b'none', b'/', 0, 32, 0"),
    "umount2": (166, 39, "b'.', 2"),
    "pivot_root": (155, 41, "b'.', b'.'"),
    "chroot": (161, 51, "b'.'"),
    "open_tree": (428, 428, "-100, b'.', 1"),
    "move_mount": (429, 429, "-100, b'.', -100, b'/', 0"),
    "fsopen": (430, 430, "b'tmpfs', 0"),
    "fsmount": (432, 432, "0, 0, 0"),
    "mount_setattr": (442, 442, "-100, b'/', 0, block, 32"),
    "memfd_secret": (447, 447, "0"),
    "landlock_create_ruleset": (444, 444, "block, 8, 0"),  # a ruleset would hold kernel memory
    "socket": (41, 198, "1, 1, 0"),
    "a lock of a file": (73, 32, "1, 6"),
    "a lock of an open file": (72, 25, "1, 37, block"),
    "a lease": (72, 25, "1, 1024, 0"),
    "notifications of a folder": (72, 25, "1, 1026, 2"),
    "a larger pipe": (72, 25, "1, 1031, 1048576"),
    "a socket through the x32 ABI": (0x4000_0029, 198, "1, 1, 0"),
}

_CODE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
block = ctypes.create_string_buffer(4096)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(block), 8)
number = {x86} if os.uname().machine == 'x86_64' else {arm}
print(libc.syscall(number, {arguments}), ctypes.get_errno())
"""


def _refused(name: str, x86: int, arm: int, arguments: str) -> Hostile:
    code = _CODE.format(x86=x86, arm=arm, arguments=arguments)
    ends = [printed("-1 1\n")]
    if x86 >= 1 << 30:
        ends.append(died(-31))  # a container's filter kills the process
    return hostile(f"asks the kernel for {name}", code, *ends, forms=("program",))


_UPROBES = {335, 336}  # on x86-64, the kernel kills the caller without a filter
_OTHERS = sorted({*range(600)} - {*CALL_SYSCALLS.values(), *_UPROBES})

_PROGRAMS = {
    "asks the kernel for each call that the list lacks": f"""
        # printed("[]\\n"), forms=("program",)
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        through = []
        for number in {_OTHERS}:
            if libc.syscall(number, -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() not in (1, 38):
                through.append(number)
        print(through)
        """,
    "opens sockets of every family": """
        # printed("{1}\\n")
        import socket
        refused = set()
        for family in range(0, 48):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
                try: socket.socket(family, kind); print('opened', family, kind)
                except OSError as error: refused.add(error.errno)
        print(refused)
        """,
    "opens pairs of sockets of every family": """
        # printed("[1] {1}\\n")
        import socket
        opened, errors = [], set()
        for family in range(48):
            try: socket.socketpair(family, socket.SOCK_STREAM); opened.append(family)
            except OSError as error: errors.add(error.errno)
        print(opened, errors)
        """,
    "connects to the machine, its services and the network": """
        # printed("9\\n")
        import socket
        refused = []
        for reach in (
            lambda: socket.create_connection(('127.0.0.1', 22), 1),
            lambda: socket.create_connection(('::1', 22), 1),
            lambda: socket.create_server(('', 0)),
            lambda: socket.getaddrinfo('localhost', 80, socket.AF_INET)[0] and socket.socket(),
            lambda: socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock'),
            lambda: socket.socket(socket.AF_UNIX).connect('/run/asterism/executor.sock'),
            lambda: socket.socket(socket.AF_UNIX).bind('\\0hostile'),
            lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).connect((2, 1)),
            lambda: socket.if_nameindex(),
        ):
            try: reach(); print('reached')
            except OSError: refused.append(1)
        print(len(refused))
        """,
    "gives a pair of sockets other addresses": """
        # printed("[]\\n")
        import os, socket
        reached = []
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            for name in ('\\0hostile', 'hostile.sock'):
                for attempt in ('bind', 'listen', 'send', 'connect', 'sendmsg'):
                    try: pair = socket.socketpair(socket.AF_UNIX, kind)
                    except OSError: continue
                    try:
                        if attempt == 'listen': pair[0].bind(name + kind.name); pair[0].listen()
                        elif attempt == 'send': pair[0].sendto(b'x', '/dev/log')
                        elif attempt == 'sendmsg': pair[0].sendmsg([b'x'], [], 0, '/dev/log')
                        elif attempt == 'connect': pair[0].connect('/dev/log')
                        elif name[0] == '\\0': pair[0].bind(name + kind.name)
                        else: continue
                        pair[1].setblocking(False)
                        if attempt in ('send', 'sendmsg') and pair[1].recv(1): continue  # its own pair
                        reached.append((kind.name, attempt))
                    except FileNotFoundError: reached.append((kind.name, 'may ' + attempt))
                    except OSError: pass
        print(sorted(set(reached)))
        """,
}

SYSTEM_CALLS = [
    *read_programs(_PROGRAMS),
    *[_refused(name, *asked) for name, asked in _REFUSED.items()],
    hostile(
        "asks for clone3",
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.syscall(435, 0, 0), ctypes.get_errno())",
        printed("-1 38\n"),  # libc then calls clone, whose flags a filter can read
    ),
]
