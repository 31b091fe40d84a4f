"""Builds the Docker seccomp profile of sandbox containers: the list of allowed system calls.

Compared to Docker's default it forbids system calls that neither Python nor the calls need (System
V and POSIX message queues, sockets other than Unix ones, ptrace, keys, kernel modules, io_uring,
bpf, clocks). It allows those with which the fork servers isolate each call: user, pid, mount and
ipc namespaces and the mounts in them. They give no rights outside the namespaces: the container has
no capabilities. Each call then denies most of them for itself (sandbox.inside.isolation.seccomp).
"""

import errno
import json
import socket

_FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate
fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat
fstatfs fsync ftruncate getcwd getdents getdents64 getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch
ioctl lchown lgetxattr link linkat listxattr llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat
newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
removexattr rename renameat renameat2 rmdir sendfile setxattr splice stat statfs statx symlink symlinkat sync
sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes vmsplice write writev
"""
_MEMORY = """
brk madvise map_shadow_stack membarrier memfd_create mincore mlock mlock2 mlockall mmap mprotect mremap mseal msync
munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect remap_file_pages
"""
_PROCESSES = """
alarm arch_prctl capget capset clone execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv
futex_wake get_robust_list get_thread_area getcpu getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid
getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill
landlock_add_rule landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prctl prlimit64
restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups
setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack sysinfo tgkill
times tkill uname vfork wait4 waitid
"""
_TIME_AND_EVENTS = """
clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait
eventfd eventfd2 gettimeofday nanosleep pipe pipe2 poll ppoll pselect6 select signalfd signalfd4 time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
"""
_CONNECTIONS = """
connect getpeername getsockname getsockopt recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto setsockopt shutdown
socketpair
"""
_ISOLATION = "mount mount_setattr pivot_root setns umount2 unshare"


def build_seccomp_profile() -> str:
    """As JSON. Other calls fail with EPERM; clone3 with ENOSYS, so that libc uses clone."""
    allowed = f"{_FILES} {_MEMORY} {_PROCESSES} {_TIME_AND_EVENTS} {_CONNECTIONS} {_ISOLATION}".split()
    unix_only = [{"index": 0, "value": int(socket.AF_UNIX), "op": "SCMP_CMP_EQ"}]
    rules = [
        {"names": allowed, "action": "SCMP_ACT_ALLOW"},
        {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": unix_only},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
    ]
    return json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": errno.EPERM, "syscalls": rules})
