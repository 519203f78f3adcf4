'use strict';
// A look-up client for shards, gateways and servers of snapshots: what embedding.proto says, and nothing else of ours.
//
//   const client = new LookupClient(['127.0.0.1:7100', '127.0.0.1:7101']);
//   const { user } = await client.lookup({ user: [1n, -5n] });   // row_ids are BigInt: all int64 are valid
//   user.values   Float32Array of 2 * user.dim       user.flags   Buffer, a byte a row_id (see Flag in the .proto)
//   client.close();

const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const PROTO_ROOT = path.join(__dirname, '..', '..', 'proto');
const MAX_MESSAGE_BYTES = 66 << 20; // 64 MiB of row_ids, flags and values, and the framing
const FIRST_PAUSE_MS = 20;

const definition = protoLoader.loadSync('frostline/v1/embedding.proto', {
  includeDirs: [PROTO_ROOT], keepCase: true, longs: String, enums: String, defaults: true, arrays: true,
});
const { EmbeddingLookup } = grpc.loadPackageDefinition(definition).frostline.v1;

const u64 = (x) => BigInt.asUintN(64, x);

/** The bucket of a row_id, as the comment at EmbeddingLookup in embedding.proto has it. */
function bucketOf(rowId, numBuckets) {
  let x = u64(rowId + 0x9e3779b97f4a7c15n);
  x = u64((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n);
  x = u64((x ^ (x >> 27n)) * 0x94d049bb133111ebn);
  return Number((x ^ (x >> 31n)) % BigInt(numBuckets));
}

class LookupClient {
  /** options: credentials (grpc-js), token (for `authorization`), deadlineMs of a look-up with all its tries. */
  constructor(addresses, { credentials = grpc.credentials.createInsecure(), token = '', deadlineMs = 5000 } = {}) {
    const options = {
      'grpc.max_receive_message_length': MAX_MESSAGE_BYTES, 'grpc.max_send_message_length': MAX_MESSAGE_BYTES,
      'grpc.enable_http_proxy': 0, // meant for the web; through it a shard on loopback cannot be reached
    };
    this.stubs = addresses.map((address) => new EmbeddingLookup(address, credentials, options));
    this.metadata = new grpc.Metadata();
    if (token) this.metadata.set('authorization', `Bearer ${token}`);
    this.deadlineMs = deadlineMs;
    this.owners = null; // of each bucket the number of its stub
    this.tables = null; // dim by name
  }

  /** Asks every process which buckets it has. */
  async learn() {
    const owners = [];
    const tables = {};
    const replies = await Promise.all(this.stubs.map((stub) => this.call(stub, 'ListTables', {})));
    replies.forEach((reply, number) => {
      for (const { first, last } of reply.buckets) for (let b = first; b <= last; b += 1) owners[b] = number;
      for (const { name, dim } of reply.tables) tables[name] = dim;
    });
    const numBuckets = replies[0].num_buckets;
    for (let b = 0; b < numBuckets; b += 1) if (owners[b] === undefined) throw new Error(`no address has bucket ${b}; name all shards`);
    this.owners = owners;
    this.tables = tables;
  }

  /** ids: {table: BigInt[]}. Returns {table: {dim, values, flags}} in the same order; each row_id goes to its own shard. */
  async lookup(ids) {
    if (this.owners === null) await this.learn();
    const rows = {};
    const parts = this.stubs.map(() => ({})); // of each stub {table: positions}
    for (const [table, rowIds] of Object.entries(ids)) {
      const outside = rowIds.find((rowId) => BigInt.asIntN(64, rowId) !== rowId);
      if (outside !== undefined) throw new Error(`row_id ${outside} is outside int64`);
      const dim = this.tables[table];
      if (dim === undefined) throw new Error(`table '${table}' does not exist (tables: ${Object.keys(this.tables).join(', ')})`);
      rows[table] = { dim, values: new Float32Array(rowIds.length * dim), flags: Buffer.alloc(rowIds.length) };
      rowIds.forEach((rowId, position) => {
        const part = parts[this.owners[bucketOf(rowId, this.owners.length)]];
        (part[table] ??= []).push(position);
      });
    }
    await Promise.all(parts.map((part, number) => this.lookUpPart(this.stubs[number], part, ids, rows)));
    return rows;
  }

  async lookUpPart(stub, part, ids, rows) {
    const tables = Object.keys(part);
    if (tables.length === 0) return;
    const rowIds = BigInt64Array.from(tables.flatMap((table) => part[table].map((position) => ids[table][position])));
    const reply = await this.call(stub, 'Lookup', {
      wire_dtype: 'WIRE_DTYPE_FLOAT32',
      tables: tables.map((table) => ({ table, num_rows: part[table].length })),
      row_ids: Buffer.from(rowIds.buffer),
    });
    // A copy, because a Float32Array begins at a multiple of 4 bytes, which a field of a message need not.
    const values = new Float32Array(Uint8Array.from(reply.values).buffer);
    let row = 0;
    let at = 0;
    for (const { table, dim } of reply.tables) {
      for (const position of part[table]) {
        rows[table].values.set(values.subarray(at, at + dim), position * dim);
        rows[table].flags[position] = reply.flags[row];
        row += 1;
        at += dim;
      }
    }
  }

  /** One call with its tries: UNAVAILABLE, and RESOURCE_EXHAUSTED after the pushback that the server asks for. */
  async call(stub, method, request) {
    const deadline = Date.now() + this.deadlineMs;
    for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs *= 2) {
      try {
        return await new Promise((resolve, reject) => {
          stub[method](request, this.metadata, { deadline }, (error, reply) => (error ? reject(error) : resolve(reply)));
        });
      } catch (error) {
        const [pushback] = error.metadata?.get('grpc-retry-pushback-ms') ?? [];
        const again = error.code === grpc.status.UNAVAILABLE || (error.code === grpc.status.RESOURCE_EXHAUSTED && pushback);
        const waitMs = pushback ? Number(pushback) : pauseMs;
        if (!again || Date.now() + waitMs >= deadline) throw error;
        await new Promise((resolve) => { setTimeout(resolve, waitMs); });
      }
    }
  }

  close() {
    for (const stub of this.stubs) stub.close();
  }
}

module.exports = { LookupClient, bucketOf };
