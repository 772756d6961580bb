/* Gathering sends and scattering receives of whole frames, by one call that the caller makes without holding any lock.
 *
 * Results are 0, a positive count, or a negative errno.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* Of one system call: IOV_MAX of Linux, and what keeps one call from filling a socket's buffer many times over. */
#define CALL_SEGMENTS_MAX 1024
#define CALL_BYTES_MAX (1 << 20)

#define RECEIVED_EOF (-ENODATA)
#define INTERRUPTED (-ECANCELED)

struct place {
    int64_t segment; /* the first that is not done */
    int64_t done;    /* bytes of it */
};

static void advance(struct place *at, const int64_t *nbytes, int64_t stride, int64_t count, int64_t moved) {
    while (at->segment < count && moved >= nbytes[at->segment * stride] - at->done) {
        moved -= nbytes[at->segment * stride] - at->done;
        at->segment++;
        at->done = 0;
    }
    at->done += moved;
}

/* Entries for what `at` says is left; `starts` and `nbytes` lie `stride` words apart. */
static int fill_iov(struct iovec *iov, int room, uint8_t *base, const int64_t *starts, const int64_t *nbytes,
                    int64_t stride, int64_t count, struct place at) {
    int used = 0;
    int64_t bytes_left = CALL_BYTES_MAX, done = at.done;
    for (int64_t i = at.segment; i < count && used < room && bytes_left > 0; i++) {
        int64_t n = nbytes[i * stride] - done;
        if (n > bytes_left) n = bytes_left;
        iov[used].iov_base = base + starts[i * stride] + done;
        iov[used].iov_len = (size_t)n;
        used++;
        bytes_left -= n;
        done = 0;
    }
    return used;
}

/* Send `prefix`, `table`, then `count` segments: `nbytes[i]` > 0 bytes from `base + src[i]`; of all that, what follows
 * the first `done` bytes. The socket blocks. 0, or an error. */
int baton_send(int fd, const uint8_t *prefix, int64_t prefix_nbytes, const uint8_t *table, int64_t table_nbytes,
               const uint8_t *base, const int64_t *src, const int64_t *nbytes, int64_t count, int64_t done) {
    struct iovec iov[CALL_SEGMENTS_MAX];
    int64_t head_nbytes = prefix_nbytes + table_nbytes, head_done = done < head_nbytes ? done : head_nbytes;
    struct place at = {0, 0};
    advance(&at, nbytes, 1, count, done - head_done);
    while (head_done < head_nbytes || at.segment < count) {
        int used = 0;
        if (head_done < prefix_nbytes) {
            iov[used].iov_base = (void *)(uintptr_t)(prefix + head_done);
            iov[used++].iov_len = (size_t)(prefix_nbytes - head_done);
        }
        if (head_done < head_nbytes && table_nbytes) {
            int64_t of_table = head_done > prefix_nbytes ? head_done - prefix_nbytes : 0;
            iov[used].iov_base = (void *)(uintptr_t)(table + of_table);
            iov[used++].iov_len = (size_t)(table_nbytes - of_table);
        }
        used += fill_iov(iov + used, CALL_SEGMENTS_MAX - used, (uint8_t *)(uintptr_t)base, src, nbytes, 1, count, at);
        struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)used};
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            return -errno;
        }
        int64_t of_head = head_nbytes - head_done < sent ? head_nbytes - head_done : sent;
        head_done += of_head;
        advance(&at, nbytes, 1, count, sent - of_head);
    }
    return 0;
}

/* Receive what there is, without waiting, into the segments of `table`, pairs of (start, length > 0), from `*at` on.
 *
 * Before each system call `*interrupt` is looked at: a caller who sets it and then gets the lock that this one holds
 * knows that nothing is received any more. 0: all segments are full. -EAGAIN: nothing more has come yet. */
int baton_receive(int fd, uint8_t *base, const int64_t *table, int64_t count, struct place *at,
                  const int32_t *interrupt) {
    struct iovec iov[CALL_SEGMENTS_MAX];
    while (at->segment < count) {
        if (__atomic_load_n(interrupt, __ATOMIC_SEQ_CST)) return INTERRUPTED;
        int used = fill_iov(iov, CALL_SEGMENTS_MAX, base, table, table + 1, 2, count, *at);
        struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)used};
        ssize_t received = recvmsg(fd, &message, MSG_DONTWAIT);
        if (received == 0) return RECEIVED_EOF;
        if (received < 0) {
            if (errno == EINTR) continue;
            return errno == EWOULDBLOCK ? -EAGAIN : -errno;
        }
        advance(at, table + 1, 2, count, received);
    }
    return 0;
}
