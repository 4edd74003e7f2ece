import assert from "node:assert/strict";
import { test } from "node:test";

import { compare, fill, untar } from "./vectors.js";

test("a wrong expectation fails", () => {
  const wrong: [unknown, unknown][] = [
    [{ a: 1 }, { a: 2 }], [{ a: 1 }, {}], [[1], [1, 2]], [{ $match: "^x" }, "y"], [{ $has: [{ a: 1 }] }, [{ a: 2 }]], [{ $length: 1 }, []], [{ $min: 2 }, 1],
    [{ $type: "string" }, 1], [null, 0], [Uint8Array.of(1), Uint8Array.of(2)], [Uint8Array.of(1), "\u0001"], [{ $tar: { a: "1" } }, new Uint8Array(1024)], [[1], "1"],
  ];
  for (const [expected, actual] of wrong) assert.throws(() => compare(expected, actual, "it"), JSON.stringify(expected));
  assert.throws(() => compare({ $nonsense: 1 }, 1, "it"), /no rule/);
});

test("a right one passes, in the wire's words and in ours", () => {
  compare({ exit_code: 1, details: { a_b: [{ $any: true }] } }, { exitCode: 1, more: 2, details: { a_b: [3] } }, "it");
  compare(fill({ x: "<<box.id>>", y: { $bytes: "/w==" } }, { box: { id: "b" } }), { x: "b", y: Uint8Array.of(255) }, "it");
  assert.throws(() => fill("<<box.id>>", {}), /there is no box/);
  assert.deepEqual(untar(new Uint8Array(1024)), {});
});
