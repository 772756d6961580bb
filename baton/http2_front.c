/* A thread in front of a gRPC server. It is given connected sockets of clients, calls the server for each on a unix
   socket, copies both ways, follows what the client sends (http2_follower.h), and ends a connection that sends what
   would cost the server more than the client. It knows nothing of Python and never has its lock.

   The server hears the client's address as the name of the socket that calls it: "\0ADDRESS:PORT.NONCE-NUMBER".
   `baton_front_add`, `_lead_to` and `_ended` are for one thread of the caller's. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "http2_follower.h"

enum { PIECE_BYTES = 65536, EVENTS = 64 };
/* PREFACE_MS: to show that the client speaks HTTP/2. LAST_WORDS_MS: to take what a server that has gone has said.
   GOODBYE_MS and _BYTES_MAX: of what comes behind our last word. */
enum { PREFACE_MS = 10000, LAST_WORDS_MS = 10000, GOODBYE_MS = 1000, GOODBYE_BYTES_MAX = 1 << 20, TICK_MS = 500 };
#define MS 1000000ull
/* A wake costs a third of what passing a message on does. So where answers come one close behind the other, as those of
   a decode node's step do, a few are gathered before the next wake: what comes meanwhile waits for so long at most. */
enum { GATHER_US = 250, DENSE_US = 400 };

struct end {
    int fd;
    struct connection *of; /* NULL: the front's own, to wake its thread */
    uint8_t *pending;      /* what is still to be written to this one; the other is not read meanwhile */
    size_t pending_at, pending_n;
    uint32_t events;
    bool deaf; /* it has hung up, and epoll would say so without end */
};

struct connection {
    struct end client, server;
    struct follower follower;
    struct heads sent; /* to the client */
    uint64_t number, ends_ns; /* ends_ns 0: no limit */
    uint32_t dropped;
    enum verdict why;
    bool paced, dead;
    bool closing; /* the client is not read any more: the server has gone, or the client has said all */
    bool goodbye; /* all is said, the client's last bytes are dropped */
    struct connection *before, *next; /* of those that live */
    struct connection *behind;        /* of those that were added, are dead or have ended */
};

struct front {
    int epoll, news; /* news: some have ended */
    struct end wake;
    pthread_t thread;
    pthread_mutex_t lists; /* `added` and `ended` */
    struct connection *added, *ended;
    struct connection *live, *dead;
    struct sockaddr_un target;
    uint64_t nonce, answered_ns; /* answered_ns: when a server was read last */
    atomic_bool stopping;
    uint8_t piece[PIECE_BYTES];
};

static uint64_t now_ns(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000ull + at.tv_nsec;
}

static void signal_fd(int fd)
{
    uint64_t one = 1;
    (void)!write(fd, &one, sizeof one);
}

static void listen_for(struct front *front, struct end *end, uint32_t events)
{
    if (end->events == events || end->fd < 0)
        return;
    struct epoll_event event = { .events = events, .data.ptr = end };
    epoll_ctl(front->epoll, end->deaf ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, end->fd, &event);
    end->events = events;
    end->deaf = false;
}

static void deafen(struct front *front, struct end *end)
{
    epoll_ctl(front->epoll, EPOLL_CTL_DEL, end->fd, NULL);
    end->events = 0;
    end->deaf = true;
}

static void forget_pending(struct end *end)
{
    free(end->pending);
    end->pending = NULL;
    end->pending_n = 0;
}

static void hang_up(struct end *end)
{
    if (end->fd >= 0)
        close(end->fd);
    end->fd = -1;
    forget_pending(end);
}

static void drop(struct front *front, struct connection *c)
{
    if (c->dead)
        return;
    c->dead = true;
    hang_up(&c->client);
    hang_up(&c->server);
    if (c->before)
        c->before->next = c->next;
    else
        front->live = c->next;
    if (c->next)
        c->next->before = c->before;
    c->behind = front->dead; /* other events of this turn may point to it */
    front->dead = c;
}

/* Nothing is to be written any more. What the client still sends is dropped for a while: a close with unread bytes
   would take back what was said last. */
static void say_goodbye(struct front *front, struct connection *c, uint64_t now)
{
    hang_up(&c->server);
    forget_pending(&c->client);
    shutdown(c->client.fd, SHUT_WR);
    c->goodbye = true;
    c->ends_ns = now + GOODBYE_MS * MS;
    listen_for(front, &c->client, EPOLLIN);
}

static bool is_between_frames(const struct heads *heads)
{
    return !heads->have && !heads->left;
}

static void end_by_verdict(struct front *front, struct connection *c, uint64_t now)
{
    c->why = c->follower.verdict;
    uint8_t goaway[HEAD_BYTES + 8] = { 0, 0, 8, GOAWAY, [9] = 127, 255, 255, 255, 0, 0, 0, CODES[c->why] };
    if (!c->client.pending_n && is_between_frames(&c->sent))
        (void)!send(c->client.fd, goaway, sizeof goaway, MSG_NOSIGNAL | MSG_DONTWAIT);
    say_goodbye(front, c, now);
}

/* The server gets nothing more; what it says last has a limit of time. */
static void leave_server(struct front *front, struct connection *c, uint64_t now)
{
    if (c->closing)
        return;
    c->closing = true;
    c->ends_ns = now + LAST_WORDS_MS * MS;
    forget_pending(&c->server);
    listen_for(front, &c->client, c->client.events & ~(uint32_t)EPOLLIN);
    listen_for(front, &c->server, c->server.events & ~(uint32_t)EPOLLOUT);
}

/* `to` takes nothing more. */
static void lost(struct front *front, struct connection *c, struct end *to, uint64_t now)
{
    if (to == &c->server)
        leave_server(front, c, now);
    else
        drop(front, c);
}

static void pass_on(struct front *front, struct end *from, struct end *to, size_t n, uint64_t now)
{
    ssize_t sent = send(to->fd, front->piece, n, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) {
        lost(front, to->of, to, now);
        return;
    }
    size_t done = sent > 0 ? sent : 0;
    if (done == n)
        return;
    to->pending = malloc(n - done);
    if (!to->pending) {
        to->of->why = NO_ROOM;
        drop(front, to->of);
        return;
    }
    memcpy(to->pending, front->piece + done, n - done);
    to->pending_at = 0;
    to->pending_n = n - done;
    listen_for(front, from, from->events & ~(uint32_t)EPOLLIN);
    listen_for(front, to, to->events | EPOLLOUT);
}

static void writable(struct front *front, struct end *to, uint64_t now)
{
    struct connection *c = to->of;
    struct end *from = to == &c->client ? &c->server : &c->client;
    ssize_t sent = send(to->fd, to->pending + to->pending_at, to->pending_n, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR)
            lost(front, c, to, now);
        return;
    }
    to->pending_at += sent;
    to->pending_n -= sent;
    if (to->pending_n)
        return;
    forget_pending(to);
    listen_for(front, to, to->events & ~(uint32_t)EPOLLOUT);
    listen_for(front, from, from->events | EPOLLIN);
}

static void drop_last_words(struct front *front, struct connection *c)
{
    ssize_t n = recv(c->client.fd, front->piece, PIECE_BYTES, MSG_DONTWAIT);
    if (n > 0)
        c->dropped += n;
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR) || c->dropped > GOODBYE_BYTES_MAX)
        drop(front, c);
}

static void read_client(struct front *front, struct connection *c, uint64_t now)
{
    ssize_t n = recv(c->client.fd, front->piece, PIECE_BYTES, MSG_DONTWAIT);
    if (n < 0) {
        if (errno != EAGAIN && errno != EINTR)
            drop(front, c);
        return;
    }
    if (n == 0) {
        shutdown(c->server.fd, SHUT_WR);
        leave_server(front, c, now);
        return;
    }
    bool greeted = c->follower.greeted;
    follow(&c->follower, front->piece, n, now);
    if (c->follower.verdict) {
        end_by_verdict(front, c, now);
        return;
    }
    if (!greeted && c->follower.greeted)
        c->ends_ns = 0;
    pass_on(front, &c->client, &c->server, n, now);
}

static void read_server(struct front *front, struct connection *c, uint64_t now)
{
    ssize_t n = recv(c->server.fd, front->piece, PIECE_BYTES, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    front->answered_ns = now;
    if (n <= 0) {
        say_goodbye(front, c, now);
        return;
    }
    size_t at = 0;
    while (next_head(&c->sent, front->piece, n, &at))
        ;
    double earned = EARNED + (double)n / EARNED_BYTES;
    earn(&c->follower, PACED_SETTINGS, earned);
    earn(&c->follower, PACED_PING, earned);
    earn(&c->follower, PACED_WINDOW, earned);
    pass_on(front, &c->server, &c->client, n, now);
}

static void serve_event(struct front *front, const struct epoll_event *event, uint64_t now)
{
    struct end *end = event->data.ptr;
    struct connection *c = end->of;
    if (!c || c->dead || end->fd < 0)
        return;
    if (c->goodbye) {
        drop_last_words(front, c);
        return;
    }
    bool is_server = end == &c->server;
    if (event->events & EPOLLOUT && end->pending_n)
        writable(front, end, now);
    if (c->dead || end->fd < 0)
        return;
    if (event->events & EPOLLIN && end->events & EPOLLIN) {
        if (is_server)
            read_server(front, c, now);
        else
            read_client(front, c, now);
    } else if (event->events & (EPOLLERR | EPOLLHUP)) {
        if (is_server && c->client.pending_n) {
            deafen(front, end); /* what it has said last is still to be read, when the client takes what came before */
            leave_server(front, c, now);
        } else {
            drop(front, c);
        }
    }
}

static void end_late_ones(struct front *front, uint64_t now)
{
    for (struct connection *c = front->live, *next; c; c = next) {
        next = c->next;
        if (!c->ends_ns || now <= c->ends_ns)
            continue;
        if (!c->follower.greeted && !c->why)
            c->why = LATE;
        drop(front, c);
    }
}

static void take_added(struct front *front, uint64_t now)
{
    pthread_mutex_lock(&front->lists);
    struct connection *added = front->added;
    front->added = NULL;
    pthread_mutex_unlock(&front->lists);
    while (added) {
        struct connection *c = added;
        added = c->behind;
        c->next = front->live;
        if (c->next)
            c->next->before = c;
        front->live = c;
        c->ends_ns = now + PREFACE_MS * MS;
        begin_following(&c->follower, now, c->paced);
        struct epoll_event client = { .events = EPOLLIN, .data.ptr = &c->client };
        struct epoll_event server = { .events = EPOLLIN, .data.ptr = &c->server };
        if (epoll_ctl(front->epoll, EPOLL_CTL_ADD, c->client.fd, &client) ||
            epoll_ctl(front->epoll, EPOLL_CTL_ADD, c->server.fd, &server)) {
            c->why = NO_ROOM;
            drop(front, c);
        }
    }
}

static void report_dead(struct front *front)
{
    if (!front->dead)
        return;
    pthread_mutex_lock(&front->lists);
    while (front->dead) {
        struct connection *c = front->dead;
        front->dead = c->behind;
        c->behind = front->ended;
        front->ended = c;
    }
    pthread_mutex_unlock(&front->lists);
    signal_fd(front->news);
}

static void *serve(void *given)
{
    struct front *front = given;
    struct epoll_event events[EVENTS];
    static const struct timespec GATHER = { .tv_nsec = GATHER_US * 1000 };
    uint64_t ticked = now_ns(), stops = 0;
    pthread_setname_np(pthread_self(), "http2-front");
    for (;;) {
        int n = epoll_wait(front->epoll, events, EVENTS, front->live ? TICK_MS : -1);
        uint64_t now = now_ns(), answered = front->answered_ns;
        take_added(front, now);
        for (int i = 0; i < n; i++)
            serve_event(front, &events[i], now);
        bool stopping = atomic_load(&front->stopping);
        if (stopping && !stops)
            stops = now + GOODBYE_MS * MS;
        if (now - ticked > TICK_MS * MS) {
            end_late_ones(front, now);
            ticked = now;
        }
        if (stopping && now > stops)
            while (front->live)
                drop(front, front->live);
        report_dead(front);
        if (stopping && !front->live)
            return NULL;
        if (front->answered_ns == now && now - answered < DENSE_US * 1000ull)
            nanosleep(&GATHER, NULL);
    }
}

static void free_all(struct connection *c)
{
    while (c) {
        struct connection *behind = c->behind;
        hang_up(&c->client);
        hang_up(&c->server);
        free(c);
        c = behind;
    }
}

/* After `baton_front_stop`, or for one whose thread never ran. */
void baton_front_free(struct front *front)
{
    free_all(front->added);
    free_all(front->ended);
    pthread_mutex_destroy(&front->lists);
    if (front->wake.fd >= 0)
        close(front->wake.fd);
    if (front->news >= 0)
        close(front->news);
    if (front->epoll >= 0)
        close(front->epoll);
    free(front);
}

/* NULL: see errno. */
struct front *baton_front_open(uint64_t nonce)
{
    struct front *front = calloc(1, sizeof *front);
    if (!front)
        return NULL;
    pthread_mutex_init(&front->lists, NULL);
    front->nonce = nonce;
    front->epoll = epoll_create1(EPOLL_CLOEXEC);
    front->news = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    front->wake.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = { .events = EPOLLIN | EPOLLET, .data.ptr = &front->wake };
    int failed = front->epoll < 0 || front->news < 0 || front->wake.fd < 0 ||
                         epoll_ctl(front->epoll, EPOLL_CTL_ADD, front->wake.fd, &event)
                     ? errno
                     : 0;
    if (!failed) {
        sigset_t all, own;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &own);
        failed = pthread_create(&front->thread, NULL, serve, front);
        pthread_sigmask(SIG_SETMASK, &own, NULL);
    }
    if (!failed)
        return front;
    baton_front_free(front);
    errno = failed;
    return NULL;
}

/* It becomes readable when a connection has ended. */
int baton_front_news(const struct front *front)
{
    return front->news;
}

/* From now on new connections are for the server at `path`. Returns 0 or an errno. */
int baton_front_lead_to(struct front *front, const char *path)
{
    if (strlen(path) >= sizeof front->target.sun_path)
        return ENAMETOOLONG;
    front->target = (struct sockaddr_un){ .sun_family = AF_UNIX };
    memcpy(front->target.sun_path, path, strlen(path));
    return 0;
}

static int call_server(const struct front *front, const char *peer, uint64_t number)
{
    struct sockaddr_un own = { .sun_family = AF_UNIX };
    int n = snprintf(own.sun_path + 1, sizeof own.sun_path - 1, "%s.%llx-%llx", peer,
                     (unsigned long long)front->nonce, (unsigned long long)number);
    if (n < 0 || (size_t)n >= sizeof own.sun_path - 1) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (!bind(fd, (void *)&own, offsetof(struct sockaddr_un, sun_path) + 1 + n) &&
        !connect(fd, (const void *)&front->target, sizeof front->target))
        return fd;
    int failed = errno;
    close(fd);
    errno = failed;
    return -1;
}

/* Take over a connected socket. `peer`: its address as "ADDRESS:PORT". Returns 0, or an errno; then it is not taken. */
int baton_front_add(struct front *front, int fd, const char *peer, int paced, uint64_t number)
{
    static const int ONE = 1;
    struct connection *c = calloc(1, sizeof *c);
    if (!c)
        return ENOMEM;
    int server = call_server(front, peer, number);
    if (server < 0) {
        int failed = errno;
        free(c);
        return failed;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &ONE, sizeof ONE);
    c->client = (struct end){ .fd = fd, .of = c, .events = EPOLLIN };
    c->server = (struct end){ .fd = server, .of = c, .events = EPOLLIN };
    c->number = number;
    c->paced = paced;
    pthread_mutex_lock(&front->lists);
    c->behind = front->added;
    front->added = c;
    pthread_mutex_unlock(&front->lists);
    signal_fd(front->wake.fd);
    return 0;
}

/* Up to `most` connections that have ended, and why; each is told once. How many. */
size_t baton_front_ended(struct front *front, uint64_t *numbers, uint8_t *whys, size_t most)
{
    uint64_t times;
    size_t n = 0;
    (void)!read(front->news, &times, sizeof times);
    pthread_mutex_lock(&front->lists);
    for (; n < most && front->ended; n++) {
        struct connection *c = front->ended;
        front->ended = c->behind;
        numbers[n] = c->number;
        whys[n] = c->why;
        free(c);
    }
    if (front->ended)
        signal_fd(front->news);
    pthread_mutex_unlock(&front->lists);
    return n;
}

/* The server has stopped. What it has said last gets a second, then all connections have ended. */
void baton_front_stop(struct front *front)
{
    atomic_store(&front->stopping, true);
    signal_fd(front->wake.fd);
    pthread_join(front->thread, NULL);
}
