-- The rules of baton/directory.py as a Redis script: each operation is atomic. All times are by the clock of Redis.
--
-- KEYS  meta      hash: epoch (when this directory began), version, complete_since
--       records   hash: name -> "incarnation sequence endpoint\n" and the record. Both numbers have a fixed width
--                 and are compared as text: a Lua number is a double and would lose the low bits
--       expiry    sorted set: name -> time when the record expires, milliseconds
--       versions  sorted set: name -> version of the last change
--       left      sorted set: name -> version of its removal
--       ran_out   sorted set: name -> the same version, for names whose record expired
--       gone      sorted set: incarnation that left or was replaced -> time until its pushes are refused, milliseconds
-- ARGV  operation, keep_ms, removals_kept_max, gone_kept_max, records_max, then the arguments of the operation
local META, RECORDS, EXPIRY, VERSIONS, LEFT, RAN_OUT, GONE = unpack(KEYS)
local operation, keep_ms = ARGV[1], tonumber(ARGV[2])
local removals_kept_max, gone_kept_max, records_max = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + clock[2] / 1000

local function next_version()
  return redis.call('HINCRBY', META, 'version', 1)
end

local function note_left(name, ran_out)
  local version = next_version()
  redis.call('ZADD', LEFT, version, name)
  redis.call('ZREM', RAN_OUT, name)
  if ran_out then redis.call('ZADD', RAN_OUT, version, name) end
  if redis.call('ZCARD', LEFT) > removals_kept_max then
    local oldest = redis.call('ZPOPMIN', LEFT)
    redis.call('HSET', META, 'complete_since', oldest[2])
    redis.call('ZREM', RAN_OUT, oldest[1])
  end
end

local function drop(name, ran_out)
  redis.call('HDEL', RECORDS, name)
  redis.call('ZREM', EXPIRY, name)
  redis.call('ZREM', VERSIONS, name)
  note_left(name, ran_out)
end

local function forget(incarnation)
  redis.call('ZADD', GONE, now_ms + keep_ms, incarnation)
  if redis.call('ZCARD', GONE) > gone_kept_max then
    redis.call('ZPOPMIN', GONE)
  end
end

-- The record that holds a name; nil if there is none or its text is not of this format.
local function holder_of(name)
  local value = redis.call('HGET', RECORDS, name)
  local expires_ms = redis.call('ZSCORE', EXPIRY, name)
  if not value or not expires_ms then return nil end
  local incarnation, sequence, endpoint, body = string.match(value, '^(%x+) (%d+) (%S+)\n(.*)$')
  if not incarnation then return nil end
  return {incarnation = incarnation, sequence = sequence, endpoint = endpoint, body = body, expires_ms = expires_ms}
end

-- Keys expire after the cluster has ended. No record and no entry of `gone` is valid for longer than keep_ms.
local function keep()
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 3 * keep_ms) end
end

local function push(name, incarnation, sequence, endpoint, body, ttl_ms)
  if redis.call('ZSCORE', GONE, incarnation) then return {'gone'} end
  local holder = holder_of(name)
  if not holder then
    local count = redis.call('ZCARD', EXPIRY)
    if count >= records_max and not redis.call('ZSCORE', EXPIRY, name) then return {'full', tostring(count)} end
  elseif holder.incarnation ~= incarnation then
    if holder.endpoint ~= endpoint then
      local left_ms = string.format('%.0f', holder.expires_ms - now_ms)
      return {'held', holder.endpoint, holder.incarnation, left_ms}
    end
    forget(holder.incarnation)
  elseif sequence <= holder.sequence then
    return {'stale'}
  end
  redis.call('HSET', RECORDS, name, incarnation .. ' ' .. sequence .. ' ' .. endpoint .. '\n' .. body)
  redis.call('ZADD', EXPIRY, now_ms + ttl_ms, name)
  if not holder or holder.incarnation ~= incarnation or holder.body ~= body then
    redis.call('ZADD', VERSIONS, next_version(), name)
    redis.call('ZREM', LEFT, name)
    redis.call('ZREM', RAN_OUT, name)
  end
  keep()
  return {'pushed'}
end

local function remove(name, incarnation)
  forget(incarnation)
  local holder = holder_of(name)
  local removed = '0'
  if not holder or holder.incarnation == incarnation then
    removed = holder and '1' or '0'
    drop(name, false)
  end
  keep()
  return {removed}
end

local function read(identity, since)
  local meta = redis.call('HMGET', META, 'epoch', 'version', 'complete_since')
  -- A Redis process that was restarted from a saved state has the same epoch and may have an older version.
  local server = redis.pcall('INFO', 'server')
  local run = type(server) == 'string' and string.match(server, 'run_id:(%x+)') or ''
  local now_identity, version = run .. '-' .. meta[1], meta[2]
  if now_identity == identity and version == since then return {now_identity, version, '0', {}, {}} end
  local snapshot = identity ~= now_identity or tonumber(since) < tonumber(meta[3])
  local after = snapshot and '-inf' or '(' .. since
  local names = redis.call('ZRANGEBYSCORE', VERSIONS, after, '+inf', 'LIMIT', 0, records_max)
  local upserts = {}
  for _, name in ipairs(names) do
    local value = redis.call('HGET', RECORDS, name)
    if value then
      upserts[#upserts + 1] = name
      upserts[#upserts + 1] = value
    end
  end
  local left = {}
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', LEFT, after, '+inf')) do
    -- A new watcher may know a node whose record expired here because Redis was out of reach: it keeps that node.
    if not snapshot or redis.call('ZSCORE', RAN_OUT, name) ~= redis.call('ZSCORE', LEFT, name) then
      left[#left + 1] = name
    end
  end
  return {now_identity, version, snapshot and '1' or '0', left, upserts}
end

local meta = redis.call('HMGET', META, 'epoch', 'version', 'complete_since')
if not meta[1] or not string.match(meta[2] or '', '^%d+$') or not string.match(meta[3] or '', '^%d+$') then
  for i, kind in ipairs({'hash', 'hash', 'zset', 'zset', 'zset', 'zset', 'zset'}) do
    local found = redis.call('TYPE', KEYS[i]).ok
    if found ~= 'none' and found ~= kind then
      return redis.error_reply('WRONGTYPE ' .. KEYS[i] .. ' is a ' .. found .. ' of another program')
    end
  end
  redis.call('DEL', unpack(KEYS))
  redis.call('HSET', META, 'epoch', clock[1] .. '.' .. clock[2], 'version', '0', 'complete_since', '0')
end
if redis.call('PTTL', META) < keep_ms then redis.call('PEXPIRE', META, 3 * keep_ms) end
local overdue = redis.call('ZRANGEBYSCORE', EXPIRY, '-inf', now_ms)
for _, name in ipairs(overdue) do drop(name, true) end
if overdue[1] then keep() end
redis.call('ZREMRANGEBYSCORE', GONE, '-inf', now_ms)
-- No entry is kept for longer than keep_ms. A later time means that the server's clock was set back.
local latest_ms = string.format('%.0f', math.ceil(now_ms + keep_ms))
for _, key in ipairs({EXPIRY, GONE}) do
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, '(' .. latest_ms, '+inf')) do
    redis.call('ZADD', key, latest_ms, member)
  end
end

if operation == 'push' then
  return push(ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], tonumber(ARGV[11]))
elseif operation == 'remove' then
  return remove(ARGV[6], ARGV[7])
else
  return read(ARGV[6], ARGV[7])
end
