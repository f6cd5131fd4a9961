/* Logs what a process does to the files below $POWER_ROOT, in order, to the file $POWER_LOG.
 *
 * One record: operation, file number, offset, length, then that many bytes.
 *   'N' a file is first seen (bytes: its path below the root)
 *   'W' a write; 'D' a write through a descriptor opened with O_DSYNC or O_SYNC
 *   'T' a truncation to `offset`; 'S' fsync or fdatasync; 'M' msync (never expected)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MAX_FD = 1024, MAX_FILES = 64 };
static char root[4096], names[MAX_FILES][512];
static int log_fd = -1, files = 0, file_of[MAX_FD], synced[MAX_FD];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

struct __attribute__((packed)) record { char op; uint8_t file; uint64_t offset, length; };

static void put(const void *bytes, size_t length) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = REAL(write);
    const char *from = bytes;
    while (length) {
        ssize_t done = real(log_fd, from, length);
        if (done <= 0) abort();
        from += done, length -= done;
    }
}

static void note(char op, int file, uint64_t offset, const struct iovec *parts, int count,
                 uint64_t length) {
    struct record head = {op, (uint8_t)file, offset, length};
    pthread_mutex_lock(&lock);
    put(&head, sizeof head);
    for (int i = 0; i < count && length; i++) {
        size_t some = parts[i].iov_len < length ? parts[i].iov_len : length;
        put(parts[i].iov_base, some);
        length -= some;
    }
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void begin(void) {
    const char *log = getenv("POWER_LOG"), *below = getenv("POWER_ROOT");
    if (!log || !below) return;
    strncpy(root, below, sizeof root - 2);
    strcat(root, "/");
    log_fd = REAL(open)(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void opened(int fd, const char *path, int flags) {
    if (fd < 0 || fd >= MAX_FD || log_fd < 0) return;
    file_of[fd] = 0;
    char full[4096];
    if (!realpath(path, full) || strncmp(full, root, strlen(root))) return;
    const char *name = full + strlen(root);
    int file = 0;
    while (file < files && strcmp(names[file], name)) file++;
    if (file == files) {
        if (files == MAX_FILES) abort();
        strncpy(names[files++], name, 511);
        struct iovec part = {(void *)name, strlen(name)};
        note('N', file, 0, &part, 1, part.iov_len);
    }
    file_of[fd] = file + 1;
    synced[fd] = (flags & (O_DSYNC | O_SYNC)) != 0;
}

#define WATCHED(fd) ((fd) >= 0 && (fd) < MAX_FD && file_of[fd])

static void wrote(int fd, const struct iovec *parts, int count, off_t offset, ssize_t length) {
    if (length > 0 && WATCHED(fd))
        note(synced[fd] ? 'D' : 'W', file_of[fd] - 1, offset, parts, count, length);
}

#define OPEN(name, params, ...)                                    \
    int name params {                                              \
        va_list rest;                                              \
        va_start(rest, flags);                                     \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;  \
        va_end(rest);                                              \
        int fd = REAL(name)(__VA_ARGS__, mode);                    \
        opened(fd, path, flags);                                   \
        return fd;                                                 \
    }
OPEN(open, (const char *path, int flags, ...), path, flags)
OPEN(open64, (const char *path, int flags, ...), path, flags)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, path, flags)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, path, flags)

int close(int fd) {
    if (fd >= 0 && fd < MAX_FD) file_of[fd] = 0;
    return REAL(close)(fd);
}

#define PWRITE(name, type)                                                  \
    ssize_t name(int fd, const void *bytes, size_t size, type offset) {     \
        ssize_t done = REAL(name)(fd, bytes, size, offset);                 \
        struct iovec part = {(void *)bytes, size};                          \
        wrote(fd, &part, 1, offset, done);                                  \
        return done;                                                        \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define PWRITEV(name, type)                                                      \
    ssize_t name(int fd, const struct iovec *parts, int count, type offset) {    \
        ssize_t done = REAL(name)(fd, parts, count, offset);                     \
        wrote(fd, parts, count, offset, done);                                   \
        return done;                                                             \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

ssize_t write(int fd, const void *bytes, size_t size) {
    off_t offset = WATCHED(fd) ? lseek(fd, 0, SEEK_CUR) : 0;
    ssize_t done = REAL(write)(fd, bytes, size);
    struct iovec part = {(void *)bytes, size};
    wrote(fd, &part, 1, offset, done);
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    off_t offset = WATCHED(fd) ? lseek(fd, 0, SEEK_CUR) : 0;
    ssize_t done = REAL(writev)(fd, parts, count);
    wrote(fd, parts, count, offset, done);
    return done;
}

#define SYNC(name)                                                     \
    int name(int fd) {                                                 \
        int result = REAL(name)(fd);                                   \
        if (!result && WATCHED(fd)) note('S', file_of[fd] - 1, 0, 0, 0, 0); \
        return result;                                                 \
    }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(name, type)                                                        \
    int name(int fd, type size) {                                                   \
        int result = REAL(name)(fd, size);                                          \
        if (!result && WATCHED(fd)) note('T', file_of[fd] - 1, size, 0, 0, 0);      \
        return result;                                                              \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

int msync(void *from, size_t length, int flags) {
    if (log_fd >= 0) note('M', 0, 0, 0, 0, 0);
    return REAL(msync)(from, length, flags);
}
