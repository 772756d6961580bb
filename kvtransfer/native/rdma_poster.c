/* RDMA WRITEs built from arrays and posted as one chain; completions polled, and waited for.
 *
 * Only what libibverbs defines inline is used, so nothing is linked to: calls go to the driver through the operations
 * of the queue pair's context. All functions may be called from one thread at a time for each queue.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Work requests of one call: the caller's chains are never longer. */
enum { CHAIN_WRS_MAX = 256, POLL_MAX = 64 };

int baton_rdma_chain_wrs_max(void) { return CHAIN_WRS_MAX; }

/* Reads memory of our own by way of the kernel, through a pipe: a wrong address is an error, and no crash. */
static int read_safely(const void *from, void *to, size_t nbytes)
{
    int ends[2];
    if (pipe(ends))
        return 0;
    int fine = write(ends[1], from, nbytes) == (ssize_t)nbytes && read(ends[0], to, nbytes) == (ssize_t)nbytes;
    close(ends[0]);
    close(ends[1]);
    return fine;
}

/* The structure that a pointer at `at` leads to, probably, if it says the same of itself as the caller; else NULL. */
struct ibv_qp *baton_rdma_qp_behind(const void *at, uint32_t qp_num)
{
    struct ibv_qp *qp, found;
    int fine = read_safely(at, &qp, sizeof qp) && read_safely(qp, &found, sizeof found);
    return fine && found.qp_num == qp_num ? qp : NULL;
}

struct ibv_cq *baton_rdma_cq_behind(const void *at, int cqe)
{
    struct ibv_cq *cq, found;
    int fine = read_safely(at, &cq, sizeof cq) && read_safely(cq, &found, sizeof found);
    return fine && found.cqe == cqe ? cq : NULL;
}

/* The descriptor of a completion channel, which the caller looks at; -1: there is none. */
int baton_rdma_channel_fd_behind(const void *at)
{
    struct ibv_comp_channel *channel, found;
    int fine = read_safely(at, &channel, sizeof channel) && read_safely(channel, &found, sizeof found);
    return fine ? found.fd : -1;
}

/* Post `count` writes (1 to CHAIN_WRS_MAX) with one doorbell; the last alone completes, as `wr_id`.
 * Returns 0, or the driver's errno: then a part of them may have been posted, and the queue pair is of no use any more.
 */
int baton_rdma_post_writes(struct ibv_qp *qp, uint64_t src_base, uint32_t lkey, uint64_t dst_base, uint32_t rkey,
                           const int64_t *src, const int64_t *dst, const int64_t *nbytes, int count, uint64_t wr_id)
{
    struct ibv_send_wr wrs[CHAIN_WRS_MAX], *bad;
    struct ibv_sge sges[CHAIN_WRS_MAX];
    if (count < 1 || count > CHAIN_WRS_MAX)
        return EINVAL;
    for (int i = 0; i < count; i++) {
        struct ibv_send_wr *wr = &wrs[i];
        sges[i].addr = src_base + (uint64_t)src[i];
        sges[i].length = (uint32_t)nbytes[i];
        sges[i].lkey = lkey;
        wr->wr_id = wr_id;
        wr->next = wr + 1;
        wr->sg_list = &sges[i];
        wr->num_sge = 1;
        wr->opcode = IBV_WR_RDMA_WRITE;
        wr->send_flags = 0;
        wr->wr.rdma.remote_addr = dst_base + (uint64_t)dst[i];
        wr->wr.rdma.rkey = rkey;
    }
    wrs[count - 1].next = NULL;
    wrs[count - 1].send_flags = IBV_SEND_SIGNALED;
    return ibv_post_send(qp, wrs, &bad);
}

/* An empty write whose immediate tells the receiver that all earlier writes of this queue pair are visible to it. */
int baton_rdma_post_seal(struct ibv_qp *qp, uint64_t dst_base, uint32_t rkey, uint32_t immediate_be, uint64_t wr_id)
{
    struct ibv_send_wr wr, *bad;
    memset(&wr, 0, sizeof wr);
    wr.wr_id = wr_id;
    wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.imm_data = immediate_be;
    wr.wr.rdma.remote_addr = dst_base;
    wr.wr.rdma.rkey = rkey;
    return ibv_post_send(qp, &wr, &bad);
}

static int take(struct ibv_cq *cq, uint64_t *wr_ids, uint32_t *statuses)
{
    struct ibv_wc wcs[POLL_MAX];
    int found = ibv_poll_cq(cq, POLL_MAX, wcs);
    for (int i = 0; i < found; i++) {
        wr_ids[i] = wcs[i].wr_id;
        statuses[i] = (uint32_t)wcs[i].status;
    }
    return found < 0 ? -EIO : found;
}

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int baton_rdma_poll_max(void) { return POLL_MAX; }

/* Up to POLL_MAX completions: at once, or within `spin_us` of polling, or after a wait of up to `timeout_ms` for one of
 * the descriptors. `waited_us` is set. `events` gets 1 if the completion channel is readable, 2 if `wake_fd` is, or
 * both. Returns how many completions; a negative errno if the device is broken.
 */
int baton_rdma_wait(struct ibv_cq *cq, int channel_fd, int wake_fd, int spin_us, int timeout_ms, uint64_t *wr_ids,
                    uint32_t *statuses, int *events, int64_t *waited_us)
{
    int64_t start = now_us();
    *events = 0;
    *waited_us = 0;
    int found = take(cq, wr_ids, statuses);
    while (found == 0 && spin_us > 0 && now_us() - start < spin_us)
        found = take(cq, wr_ids, statuses);
    if (found == 0) {
        int failed = ibv_req_notify_cq(cq, 0);
        if (failed)
            return failed < 0 ? failed : -failed;
        /* One may have come before the device was asked to tell. */
        found = take(cq, wr_ids, statuses);
    }
    if (found == 0) {
        struct pollfd fds[2] = {{channel_fd, POLLIN, 0}, {wake_fd, POLLIN, 0}};
        if (poll(fds, 2, timeout_ms) > 0)
            *events = (fds[0].revents ? 1 : 0) | (fds[1].revents ? 2 : 0);
        found = take(cq, wr_ids, statuses);
    }
    *waited_us = now_us() - start;
    return found;
}

/* A device that does nothing, for tests and for measuring the code above. With `log`, it keeps what is posted there and
 * completes what asks for it.
 */
struct posted {
    uint64_t wr_id, remote_addr, local_addr;
    uint32_t length, lkey, rkey, opcode, flags, immediate_be, chain;
};

struct null_device {
    struct ibv_context context;
    struct ibv_qp qp;
    struct ibv_cq cq;
    struct posted *log;
    int log_max, logged, taken, chains;
};

static int null_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    (void)qp, (void)wr, (void)bad;
    return 0;
}

static int log_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct null_device *device = qp->qp_context;
    device->chains++;
    for (; wr; wr = wr->next) {
        if (device->logged == device->log_max) {
            *bad = wr;
            return ENOMEM;
        }
        struct posted *to = &device->log[device->logged++];
        memset(to, 0, sizeof *to);
        to->wr_id = wr->wr_id;
        to->remote_addr = wr->wr.rdma.remote_addr;
        if (wr->num_sge) {
            to->local_addr = wr->sg_list->addr;
            to->length = wr->sg_list->length;
            to->lkey = wr->sg_list->lkey;
        }
        to->rkey = wr->wr.rdma.rkey;
        to->opcode = wr->opcode;
        to->flags = wr->send_flags;
        to->immediate_be = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? wr->imm_data : 0;
        to->chain = (uint32_t)device->chains;
    }
    return 0;
}

static int log_poll_cq(struct ibv_cq *cq, int max, struct ibv_wc *wcs)
{
    struct null_device *device = cq->cq_context;
    int found = 0;
    for (; device->taken < device->logged && found < max; device->taken++) {
        if (device->log[device->taken].flags & IBV_SEND_SIGNALED) {
            memset(&wcs[found], 0, sizeof wcs[found]);
            wcs[found++].wr_id = device->log[device->taken].wr_id;
        }
    }
    return found;
}

static int null_req_notify_cq(struct ibv_cq *cq, int solicited)
{
    (void)cq, (void)solicited;
    return 0;
}

size_t baton_rdma_null_bytes(void) { return sizeof(struct null_device); }

/* Makes a null device in `device`, which holds baton_rdma_null_bytes() bytes. `log` may be NULL. */
void baton_rdma_null_init(struct null_device *device, struct posted *log, int log_max, uint32_t qp_num)
{
    memset(device, 0, sizeof *device);
    device->log = log;
    device->log_max = log_max;
    device->context.ops.post_send = log ? log_post_send : null_post_send;
    device->context.ops.poll_cq = log_poll_cq;
    device->context.ops.req_notify_cq = null_req_notify_cq;
    device->qp.context = device->cq.context = &device->context;
    device->qp.qp_context = device->cq.cq_context = device;
    device->qp.qp_num = qp_num;
}

struct ibv_qp *baton_rdma_null_qp(struct null_device *device) { return &device->qp; }

struct ibv_cq *baton_rdma_null_cq(struct null_device *device) { return &device->cq; }

int baton_rdma_null_logged(const struct null_device *device) { return device->logged; }
