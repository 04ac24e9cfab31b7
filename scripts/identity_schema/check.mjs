// Reads reports, one JSON body a line, and checks the `identity` of each against the endpoint's public schema:
//
//     npm install --prefix scripts/identity_schema
//     PYTHONPATH=. .venv/bin/python tests/report_bodies.py | node scripts/identity_schema/check.mjs
import { createInterface } from "node:readline";
import { ReportedIdentitySchema } from "@kya-os/checkpoint-shared";

let count = 0;
let wrong = 0;
for await (const line of createInterface({ input: process.stdin })) {
  const { identity } = JSON.parse(line);
  const { success, error, data } = ReportedIdentitySchema.safeParse(identity);
  // The schema drops what it does not know; nothing of ours may get lost that way.
  if (!success || JSON.stringify(data) !== JSON.stringify(identity)) {
    wrong += 1;
    console.error(`${JSON.stringify(identity)}: ${error ?? "the schema changes it"}`);
  }
  count += 1;
}
if (ReportedIdentitySchema.safeParse({ agent: { clientInfoName: " " } }).success) {
  throw new Error("the schema accepts a blank name: is it the real one?");
}
console.log(`${count} identities, ${wrong} of them wrong`);
process.exitCode = count === 0 || wrong > 0 ? 1 : 0;
