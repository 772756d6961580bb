/* The follower of HTTP/2's frames, for tests that drive it alone. */

#include "../../baton/http2_follower.h"

size_t follower_nbytes(void)
{
    return sizeof(struct follower);
}

void follower_begin(struct follower *f, uint64_t now_ns, int paced)
{
    begin_following(f, now_ns, paced);
}

size_t follower_take(struct follower *f, const uint8_t *bytes, size_t n, uint64_t now_ns)
{
    return follow(f, bytes, n, now_ns);
}

int follower_verdict(const struct follower *f)
{
    return f->verdict;
}
