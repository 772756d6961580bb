/* What a client may send to a server of gRPC: follows the frames of HTTP/2 by their heads, and counts the entries of
   header blocks. It decodes nothing, keeps no bytes, and calls nothing: a function of the bytes and of the clock. */

#ifndef BATON_HTTP2_FOLLOWER_H
#define BATON_HTTP2_FOLLOWER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4, PADDED = 8, PRIORITISED = 32 };
enum { HEAD_BYTES = 9 };

/* What gRPC tells clients to keep to. Of DATA it checks the size itself. */
enum { FRAME_BYTES_MAX = 16384 };
/* Four times what a call that is served may have, so that who has a little too much hears why. An entry may be a
   single byte, and each becomes a tuple on the server's loop. */
enum { BLOCK_BYTES_MAX = 65536, BLOCK_FRAMES_MAX = 32, ENTRIES_MAX = 256 };

enum verdict { FINE, NO_PREFACE, NO_SETTINGS, FRAME_SIZE, BLOCK_SIZE, BLOCK_BROKEN, PUSHED, TOO_FAST,
               /* no verdicts of the follower: why else a connection is ended */ LATE, NO_ROOM, VERDICTS };
/* The error codes of HTTP/2 for them. */
static const uint8_t CODES[VERDICTS] = { 0, 1, 1, 6, 11, 1, 1, 11, 0, 0 };

static const char PREFACE[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
enum { PREFACE_BYTES = sizeof(PREFACE) - 1 };

/* Frames that cost their sender nothing, and how many of them a connection may send: at once, and per second. */
enum paced { PACED_SETTINGS, PACED_PING, PACED_RESET, PACED_PRIORITY, PACED_EMPTY, PACED_WINDOW, PACED_OTHER, PACED };
static const struct { float burst, per_s; } PACES[PACED] = {
    [PACED_SETTINGS] = { 64, 10 },     [PACED_PING] = { 1000, 100 },   [PACED_RESET] = { 4096, 500 },
    [PACED_PRIORITY] = { 1000, 100 },  [PACED_EMPTY] = { 1000, 100 },  [PACED_WINDOW] = { 8192, 1000 },
    [PACED_OTHER] = { 64, 10 },
};
/* Clients answer what they get with pings and with window updates, so each piece that they are sent allows more. */
enum { EARNED = 4, EARNED_BYTES = 256 };

struct heads {
    uint8_t head[HEAD_BYTES], have;
    uint32_t left; /* bytes of the payload */
};

/* Counts the entries of a header block (HPACK), without their values. */
struct entries {
    enum { ENTRY, INDEX, LENGTH, LONG_LENGTH, TEXT } at;
    uint32_t count, text_left;
    uint8_t before, texts, shift; /* before: bytes of the frame that are not of the block */
};

struct follower {
    struct heads heads;
    struct entries entries;
    uint8_t verdict, preface;
    bool greeted, in_block, paced, is_block; /* is_block: the frame's payload */
    uint32_t block_stream, block_bytes, block_frames;
    uint64_t refilled_ns;
    double tokens[PACED];
};

/* Skip up to behind the next head, which is then in `heads`. False: the bytes end before. */
static bool next_head(struct heads *heads, const uint8_t *bytes, size_t n, size_t *at)
{
    size_t skipped = n - *at < heads->left ? n - *at : heads->left;
    heads->left -= skipped;
    *at += skipped;
    size_t taken = n - *at;
    if (taken > (size_t)(HEAD_BYTES - heads->have))
        taken = HEAD_BYTES - heads->have;
    memcpy(heads->head + heads->have, bytes + *at, taken);
    heads->have += taken;
    *at += taken;
    if (heads->have < HEAD_BYTES)
        return false;
    heads->have = 0;
    heads->left = heads->head[0] << 16 | heads->head[1] << 8 | heads->head[2];
    return true;
}

static enum verdict spend(struct follower *f, enum paced what)
{
    if (!f->paced)
        return FINE;
    if (f->tokens[what] < 1)
        return TOO_FAST;
    f->tokens[what] -= 1;
    return FINE;
}

/* A number, or the text of the length `text_left`, has ended. */
static void next_text(struct entries *e)
{
    if (e->at == TEXT && e->text_left)
        return;
    if (e->at == TEXT)
        e->texts--;
    e->at = e->texts ? LENGTH : ENTRY;
}

static void begin_entry(struct entries *e, uint8_t byte)
{
    uint8_t mask = byte & 128 ? 127 : byte & 64 ? 63 : byte & 32 ? 31 : 15;
    bool has_value = byte & 64 || !(byte & 32);
    e->count++;
    e->texts = byte & 128 || !has_value ? 0 : byte & mask ? 1 : 2;
    e->at = INDEX;
    if ((byte & mask) != mask)
        next_text(e);
}

static enum verdict count_byte(struct entries *e, uint8_t byte)
{
    switch (e->at) {
    case ENTRY:
        begin_entry(e, byte);
        return e->count > ENTRIES_MAX ? BLOCK_SIZE : FINE;
    case INDEX:
        if (!(byte & 128))
            next_text(e);
        return FINE;
    case LENGTH:
        e->text_left = byte & 127;
        e->shift = 0;
        e->at = e->text_left == 127 ? LONG_LENGTH : TEXT;
        break;
    case LONG_LENGTH:
        if (e->shift > 21)
            return BLOCK_BROKEN;
        e->text_left += (uint32_t)(byte & 127) << e->shift;
        e->shift += 7;
        if (!(byte & 128))
            e->at = TEXT;
        break;
    case TEXT:
        e->text_left--;
        break;
    }
    if (e->at == TEXT)
        next_text(e);
    return FINE;
}

static void count_entries(struct follower *f, const uint8_t *bytes, size_t n, size_t *at)
{
    while (f->heads.left && *at < n && !f->verdict) {
        f->heads.left--;
        if (f->entries.before) {
            f->entries.before--;
            ++*at;
        } else {
            f->verdict = count_byte(&f->entries, bytes[(*at)++]);
        }
    }
}

static enum verdict judge_block(struct follower *f, uint8_t kind, uint8_t flags, uint32_t stream, uint32_t length)
{
    if (kind == HEADERS && flags & PADDED)
        return BLOCK_BROKEN; /* no client of gRPC does, and the end of the block would have to be known */
    if (kind == HEADERS) {
        f->entries = (struct entries){ .before = flags & PRIORITISED ? 5 : 0 };
        f->in_block = true;
        f->block_stream = stream;
        f->block_bytes = f->block_frames = 0;
    } else if (!f->in_block || stream != f->block_stream) {
        return BLOCK_BROKEN;
    }
    f->block_bytes += length;
    f->block_frames += 1;
    if (f->block_bytes > BLOCK_BYTES_MAX || f->block_frames > BLOCK_FRAMES_MAX)
        return BLOCK_SIZE;
    f->in_block = !(flags & END_HEADERS);
    return FINE;
}

static enum verdict judge(struct follower *f)
{
    const uint8_t *head = f->heads.head;
    uint8_t kind = head[3], flags = head[4];
    uint32_t length = f->heads.left;
    uint32_t stream = (head[5] & 127u) << 24 | head[6] << 16 | head[7] << 8 | head[8];

    if (kind != DATA && length > FRAME_BYTES_MAX)
        return kind == HEADERS || kind == CONTINUATION ? BLOCK_SIZE : FRAME_SIZE;
    if (!f->greeted && (kind != SETTINGS || flags & ACK))
        return NO_SETTINGS;
    f->greeted = true;
    f->is_block = kind == HEADERS || kind == CONTINUATION;
    if (f->in_block && kind != CONTINUATION)
        return BLOCK_BROKEN;
    switch (kind) {
    case DATA:
        return (length && !(flags & PADDED)) || flags & END_STREAM ? FINE : spend(f, PACED_EMPTY);
    case HEADERS:
    case CONTINUATION:
        return judge_block(f, kind, flags, stream, length);
    case PUSH_PROMISE:
        return PUSHED;
    case PRIORITY:
        return spend(f, PACED_PRIORITY);
    case RST_STREAM:
        return spend(f, PACED_RESET);
    case SETTINGS:
        return spend(f, PACED_SETTINGS);
    case PING:
        return spend(f, PACED_PING);
    case WINDOW_UPDATE:
        return spend(f, PACED_WINDOW);
    default:
        return spend(f, PACED_OTHER);
    }
}

static void earn(struct follower *f, enum paced what, double tokens)
{
    double sum = f->tokens[what] + tokens;
    f->tokens[what] = sum > PACES[what].burst ? PACES[what].burst : sum;
}

/* `paced`: false for a proxy of ours, which speaks for many. */
static void begin_following(struct follower *f, uint64_t now_ns, bool paced)
{
    memset(f, 0, sizeof *f);
    f->refilled_ns = now_ns;
    f->paced = paced;
    for (unsigned what = 0; what < PACED; what++)
        f->tokens[what] = PACES[what].burst;
}

/* How many bytes were looked at: all, or up to behind what must not be. */
static size_t follow(struct follower *f, const uint8_t *bytes, size_t n, uint64_t now_ns)
{
    size_t at = 0;
    double passed_s = (now_ns - f->refilled_ns) / 1e9;
    f->refilled_ns = now_ns;
    for (unsigned what = 0; what < PACED; what++)
        earn(f, what, PACES[what].per_s * passed_s);
    while (f->preface < PREFACE_BYTES && at < n && !f->verdict)
        if (bytes[at++] != (uint8_t)PREFACE[f->preface++])
            f->verdict = NO_PREFACE;
    while (!f->verdict && f->preface == PREFACE_BYTES) {
        if (f->is_block)
            count_entries(f, bytes, n, &at);
        if (f->verdict || !next_head(&f->heads, bytes, n, &at))
            break;
        f->verdict = judge(f);
    }
    return at;
}

#endif
