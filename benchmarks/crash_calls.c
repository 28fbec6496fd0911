/* One system call in $CRASH_ONE_IN on files below $CRASH_BELOW fails, as $CRASH_SEED draws it (LD_PRELOAD).

Open, read, write, fsync, rename, link, unlink and statvfs, with EIO, ENOSPC or EINTR. What is about to happen does not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static uint64_t calls;

static int below(const char *path)
{
    const char *place = getenv("CRASH_BELOW");
    return place && path && !strncmp(path, place, strlen(place));
}

static int open_below(int file)
{
    char link[32], path[PATH_MAX];
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (size < 0)
        return 0;
    path[size] = 0;
    return below(path);
}

/* splitmix64 of the seed and the number of the call: the same draws for the same order of calls. */
static int fails(void)
{
    static const int errors[] = {EIO, ENOSPC, EINTR};
    const char *seed = getenv("CRASH_SEED"), *one_in = getenv("CRASH_ONE_IN");
    if (!seed || !one_in)
        return 0;
    uint64_t drawn = strtoull(seed, 0, 10) + 0x9e3779b97f4a7c15u * (__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED));
    drawn = (drawn ^ (drawn >> 30)) * 0xbf58476d1ce4e5b9u;
    drawn = (drawn ^ (drawn >> 27)) * 0x94d049bb133111ebu;
    drawn ^= drawn >> 31;
    if (drawn % strtoull(one_in, 0, 10))
        return 0;
    errno = errors[(drawn >> 32) % 3];
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name, parameters, ...)             \
    int name parameters                         \
    {                                           \
        va_list rest;                           \
        va_start(rest, flags);                  \
        mode_t mode = va_arg(rest, mode_t);     \
        va_end(rest);                           \
        if (below(path) && fails())             \
            return -1;                          \
        return REAL(name)(__VA_ARGS__, mode);   \
    }
OPEN(open, (const char *path, int flags, ...), path, flags)
OPEN(open64, (const char *path, int flags, ...), path, flags)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, path, flags)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, path, flags)

#define OF_FILE(result, name, parameters, ...)          \
    result name parameters                              \
    {                                                   \
        if (open_below(file) && fails())                \
            return -1;                                  \
        return REAL(name)(__VA_ARGS__);                 \
    }
OF_FILE(ssize_t, read, (int file, void *to, size_t size), file, to, size)
OF_FILE(ssize_t, pread, (int file, void *to, size_t size, off_t at), file, to, size, at)
OF_FILE(ssize_t, pread64, (int file, void *to, size_t size, off64_t at), file, to, size, at)
OF_FILE(ssize_t, write, (int file, const void *from, size_t size), file, from, size)
OF_FILE(ssize_t, writev, (int file, const struct iovec *from, int count), file, from, count)
OF_FILE(ssize_t, pwrite, (int file, const void *from, size_t size, off_t at), file, from, size, at)
OF_FILE(ssize_t, pwrite64, (int file, const void *from, size_t size, off64_t at), file, from, size, at)
OF_FILE(int, fsync, (int file), file)
OF_FILE(int, fdatasync, (int file), file)

#define OF_PATH(name, parameters, path, ...)            \
    int name parameters                                 \
    {                                                   \
        if (below(path) && fails())                     \
            return -1;                                  \
        return REAL(name)(__VA_ARGS__);                 \
    }
OF_PATH(rename, (const char *from, const char *to), to, from, to)
OF_PATH(renameat, (int a, const char *from, int b, const char *to), to, a, from, b, to)
OF_PATH(link, (const char *from, const char *to), to, from, to)
OF_PATH(linkat, (int a, const char *from, int b, const char *to, int flags), to, a, from, b, to, flags)
OF_PATH(unlink, (const char *path), path, path)
OF_PATH(unlinkat, (int folder, const char *path, int flags), path, folder, path, flags)
OF_PATH(statvfs, (const char *path, struct statvfs *found), path, path, found)
OF_PATH(statvfs64, (const char *path, struct statvfs64 *found), path, path, found)
