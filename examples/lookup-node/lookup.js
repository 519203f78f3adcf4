#!/usr/bin/env node
'use strict';
// node lookup.js --address HOST:PORT [--address HOST:PORT ...] [--ca FILE] [--token-file FILE] TABLE=ID,ID,... ...
//
// Prints one JSON object: of each table its dim, and of its rows, in order, the values (base64 of little-endian float32)
// and the flags (base64 of a byte a row_id).

const fs = require('node:fs');
const { parseArgs } = require('node:util');
const grpc = require('@grpc/grpc-js');
const { LookupClient } = require('./lookup_client');

async function main() {
  const { values: options, positionals } = parseArgs({
    allowPositionals: true,
    options: { address: { type: 'string', multiple: true }, ca: { type: 'string' }, 'token-file': { type: 'string' } },
  });
  if (!options.address || positionals.length === 0) {
    throw new Error('usage: node lookup.js --address HOST:PORT [--ca FILE] [--token-file FILE] TABLE=ID,ID,... ...');
  }
  const ids = Object.fromEntries(positionals.map((text) => {
    const [table, list] = [text.slice(0, text.lastIndexOf('=')), text.slice(text.lastIndexOf('=') + 1)];
    return [table, list === '' ? [] : list.split(',').map(BigInt)];
  }));
  const client = new LookupClient(options.address, {
    credentials: options.ca ? grpc.credentials.createSsl(fs.readFileSync(options.ca)) : grpc.credentials.createInsecure(),
    token: options['token-file'] ? fs.readFileSync(options['token-file'], 'utf8').trim() : '',
  });
  try {
    const rows = await client.lookup(ids);
    const printed = Object.entries(rows).map(([table, { dim, values, flags }]) => {
      const bytes = Buffer.from(values.buffer, values.byteOffset, values.byteLength);
      return [table, { dim, values: bytes.toString('base64'), flags: flags.toString('base64') }];
    });
    process.stdout.write(`${JSON.stringify(Object.fromEntries(printed))}\n`);
  } finally {
    client.close();
  }
}

main().catch((error) => {
  process.stderr.write(`error: ${error.message}\n`);
  process.exitCode = 1;
});
