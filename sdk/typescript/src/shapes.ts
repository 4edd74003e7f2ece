/**
 * From the wire's snake_case to camelCase and back, by the generated table of shapes: the names of fields are converted, the keys of
 * maps (labels, environments, limits) and whatever has no shape (policies, details) are left as they are. Fields that a newer server
 * adds pass through.
 */

import { isRecord } from "./errors.js";
import { shapes } from "./generated.js";

export function camel(name: string): string {
  return name.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());
}

export function snake(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => "_" + letter.toLowerCase());
}

/** What the server said, as the interface that was generated for `shape`. */
export function read<T>(shape: string, value: unknown): T {
  return convert(shape, value, camel, (name) => name) as T;
}

/** What the caller says, as the server wants it. */
export function write(shape: string, value: unknown): Record<string, unknown> {
  return convert(shape, value, snake, snake) as Record<string, unknown>;
}

function convert(shape: string, value: unknown, rename: (name: string) => string, wire: (name: string) => string): unknown {
  if (Array.isArray(value)) {
    const inner = shape.startsWith("[]") ? shape.slice(2) : shape;
    return value.map((item) => convert(inner, item, rename, wire));
  }
  if (!isRecord(value)) return value;
  if (shape.startsWith("{}")) {
    const inner = shape.slice(2);
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, convert(inner, item, rename, wire)]));
  }
  const held = shapes[shape] ?? {};
  const made: Record<string, unknown> = {};
  for (const [name, item] of Object.entries(value)) {
    if (item === undefined) continue;
    const kind = held[wire(name)];
    made[rename(name)] = kind === undefined ? item : convert(kind, item, rename, wire);
  }
  return made;
}
