// Writes tests/server/zod_schemas.json: the JSON schema of each type of zod, with values that fit the type and values
// that do not, as zod itself says. Run once, in a folder of its own:
//   npm install zod@4.6.7 zod-to-json-schema@3.25.2 && node zod_schemas.mjs > zod_schemas.json
import * as z from "zod";
import * as z3 from "zod/v3";
import { zodToJsonSchema } from "zod-to-json-schema";
const U="550e8400-e29b-41d4-a716-446655440000";
const tree = z.object({name: z.string(), get children(){ return z.array(tree); }});
const T = {
 string:[z.string(),["a"],[1]], string_min_max:[z.string().min(2).max(3),["ab"],["a","abcd"]], string_length:[z.string().length(2),["ab"],["a"]],
 string_regex:[z.string().regex(/^[a-z]+-\d{2}$/),["ab-12"],["ab-1"]], string_starts:[z.string().startsWith("a/b"),["a/bc"],["b"]], string_ends:[z.string().endsWith(".ts"),["a.ts"],["a.js"]], string_includes:[z.string().includes("x+"),["ax+"],["ax"]],
 lowercase:[z.string().lowercase(),["ab"],["aB"]], uppercase:[z.string().uppercase(),["AB"],["aB"]], trim:[z.string().trim(),["a"],[1]],
 password:[z.string().regex(/^(?=.*[a-z])(?=.*[A-Z])(?=.*\d).{8,}$/),["abcdEF12"],["abcdefgh","aB1"]],
 email:[z.email(),["a.b@example.org"],["a","@b.c"]], uuid:[z.uuid(),[U],["x"]], uuidv4:[z.uuidv4(),[U],["x"]], uuidv6:[z.uuidv6(),["1ef21d2f-1207-6660-8c4f-419efbd44d48"],[U]], uuidv7:[z.uuidv7(),["018f6c3e-7b5a-7cc1-9c5f-3a9f6f3f0f00"],[U]], guid:[z.guid(),[U],["x"]],
 url:[z.url(),["https://example.org/a?b=c"],["x y"]], http_url:[z.httpUrl(),["https://example.org/a"],[" "]], hostname:[z.hostname(),["example.org"],["-a-","a b"]],
 nanoid:[z.nanoid(),["V1StGXR8_Z5jdHi6B-myT"],["a"]], cuid:[z.cuid(),["cjld2cjxh0000qzrmn831i7rn"],["a"]], cuid2:[z.cuid2(),["tz4a98xxat96iws9zmbrgj3a"],["-"]], ulid:[z.ulid(),["01ARZ3NDEKTSV4RRFFQ69G5FAV"],["a"]], xid:[z.xid(),["9m4e2mr0ui3e8a215n4g"],["a"]], ksuid:[z.ksuid(),["0ujsswThIGTUYm2K8FjOOfXtY1K"],["a"]],
 ipv4:[z.ipv4(),["127.0.0.1"],["256.0.0.1"]], ipv6:[z.ipv6(),["2001:db8::1"],["g::"]], cidrv4:[z.cidrv4(),["10.0.0.0/8"],["10.0.0.0"]], cidrv6:[z.cidrv6(),["2001:db8::/32"],["2001:db8::"]], mac:[z.mac(),["00:1a:2b:3c:4d:5e"],["00"]],
 base64:[z.base64(),["aGVsbG8=",""],["a"]], base64url:[z.base64url(),["aGVsbG8"],["a+"]], e164:[z.e164(),["+15555550100"],["1"]], jwt:[z.jwt(),["eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxIn0.c2ln"],[1]], emoji:[z.emoji(),["😀"],["a"]], hash:[z.hash("md5"),["d41d8cd98f00b204e9800998ecf8427e"],["a"]], hex:[z.hex(),["0aF"],["g"]], string_format:[z.stringFormat("crm", /^[A-Z]{3}$/),["ABC"],["abc"]], slugify:[z.string().slugify(),["a"],[1]],
 iban:[z.iban(),["DE89370400440532013000"],["x"]], credit_card:[z.creditCard(),["4111111111111111"],["x"]], currency_code:[z.currencyCode(),["EUR"],["eur"]],
 iso_date:[z.iso.date(),["2024-02-29"],["2023-02-29","2024-1-1"]], iso_time:[z.iso.time(),["12:30:00","12:30:00.5"],["25:00:00"]], iso_time_minutes:[z.iso.time({precision:-1}),["12:30"],["12:30:00"]], iso_datetime:[z.iso.datetime(),["2024-02-29T12:30:00Z"],["2024-02-29"]], iso_datetime_offset:[z.iso.datetime({offset:true}),["2024-02-29T12:30:00+02:00"],["2024-02-29"]], iso_datetime_local:[z.iso.datetime({local:true}),["2024-02-29T12:30:00"],["2024-02-29"]], iso_datetime_precision:[z.iso.datetime({precision:3}),["2024-02-29T12:30:00.123Z"],["2024-02-29T12:30:00Z"]], iso_datetime_minutes:[z.iso.datetime({precision:-1}),["2024-02-29T12:30Z"],["2024-02-29T12:30:00Z"]], iso_duration:[z.iso.duration(),["P1DT12H"],["1D"]],
 number:[z.number(),[1.5],["1"]], int:[z.int(),[3],[1.5]], int32:[z.int32(),[3],[2147483648]], uint32:[z.uint32(),[3],[-1]], float32:[z.float32(),[1.5],["1"]], float64:[z.float64(),[1.5],["1"]], number_bounds:[z.number().min(1).max(2.5),[2],[3]], positive:[z.number().positive(),[1],[0]], nonnegative:[z.number().nonnegative(),[0],[-1]], multiple_of:[z.number().multipleOf(5),[10],[7]],
 boolean:[z.boolean(),[true],[1]], stringbool:[z.stringbool(),[],[]], null:[z.null(),[null],[1]], any:[z.any(),[1,null],[]], unknown:[z.unknown(),["a"],[]], literal:[z.literal("a"),["a"],["b"]], literal_many:[z.literal(["a",1,true]),["a",1],["b"]], enum:[z.enum(["a","b"]),["a"],["c"]], native_enum:[z.nativeEnum({A:"x",B:1}),["x",1],["y"]], template_literal:[z.templateLiteral([z.number(),z.enum(["px","em"])]),["12px"],["px"]],
 array:[z.array(z.string()),[["a"],[]],[[1]]], array_min_max:[z.array(z.int()).min(1).max(2),[[1]],[[],[1,2,3]]], nonempty:[z.array(z.int()).nonempty(),[[1]],[[]]], tuple:[z.tuple([z.string(),z.int()]),[["a",1]],[["a","b"],[1]]], tuple_rest:[z.tuple([z.string()],z.int()),[["a",1,2]],[[1],["a","b"]]], 
 object:[z.object({a:z.string(),b:z.int().optional()}),[{a:"x"},{a:"x",b:1}],[{b:1}]], strict_object:[z.strictObject({a:z.string()}),[{a:"x"}],[{a:"x",c:1}]], loose_object:[z.looseObject({a:z.string()}),[{a:"x",c:1}],[{c:1}]], catchall:[z.object({a:z.string()}).catchall(z.int()),[{a:"x",c:1}],[{a:"x",c:"y"}]], partial:[z.object({a:z.string()}).partial(),[{}],[{a:1}]], recursive:[tree,[{name:"a",children:[{name:"b",children:[]}]}],[{name:"a"}]], empty_object:[z.object({}),[{}],[]],
 record:[z.record(z.string(),z.string()),[{a:"b"},{}],[{a:1}]], record_regex:[z.record(z.string().regex(/^x-/),z.int()),[{"x-a":1}],[{a:1}]], record_min:[z.record(z.string().min(2),z.int()),[{ab:1}],[{a:1}]], record_uuid:[z.record(z.uuid(),z.int()),[{[U]:1}],[{a:1}]], record_email:[z.record(z.email(),z.int()),[{"a@b.cc":1}],[{a:1}]], record_enum:[z.record(z.enum(["a","b"]),z.int()),[{a:1,b:2}],[{a:1,c:2}]], partial_record:[z.partialRecord(z.enum(["a","b"]),z.int()),[{a:1},{}],[{c:2}]], record_union:[z.record(z.union([z.literal("a"),z.literal("b")]),z.int()),[{a:1,b:2}],[{c:1}]], record_number:[z.record(z.number(),z.int()),[],[]], loose_record:[z.looseRecord(z.string().regex(/^x-/),z.int()),[{"x-a":1}],[{"x-a":"y"}]], record_template:[z.record(z.templateLiteral(["id-",z.int()]),z.int()),[{"id-1":1}],[{a:1}]],
 union:[z.union([z.string(),z.int()]),["a",1],[null]], xor:[z.xor([z.string(),z.int()]),["a",1],[null]], discriminated:[z.discriminatedUnion("k",[z.object({k:z.literal("a"),v:z.int()}),z.object({k:z.literal("b"),w:z.string()})]),[{k:"a",v:1},{k:"b",w:"x"}],[{k:"a",w:"x"}]], intersection:[z.intersection(z.object({a:z.int()}),z.object({b:z.int()})),[{a:1,b:2}],[{a:1}]], 
 nullable:[z.string().nullable(),["a",null],[1]], optional:[z.string().optional(),["a"],[1]], nullish:[z.string().nullish(),["a",null],[1]], exact_optional:[z.exactOptional(z.string()),["a"],[1]], nonoptional:[z.string().optional().nonoptional(),["a"],[1]], default:[z.string().default("x"),["a"],[1]], prefault:[z.string().prefault("x"),["a"],[1]], catch:[z.string().catch("x"),["a"],[]], readonly:[z.string().readonly(),["a"],[1]], brand:[z.string().brand("B"),["a"],[1]], describe:[z.string().describe("d"),["a"],[1]], meta:[z.string().meta({title:"t",examples:["a"],deprecated:true,id:"Named"}),["a"],[1]], lazy:[z.lazy(()=>z.string()),["a"],[1]], refine:[z.string().refine(s=>s.length>0),["a"],[1]], pipe:[z.string().pipe(z.string().min(1)),["a"],[1]], keyof:[z.object({a:z.int()}).keyof(),["a"],["b"]], json:[z.json(),[{a:[1,null]}],[]], 
 never_optional:[z.never().optional(),[],["a"]],
 file:[z.file(),[],[]],
};
// targets: what openai's and Vercel's helpers and the MCP SDK ask of zod
const out = {zod: {version: "4.6.7", types: {}}, "zod-draft-7": {version: "4.6.7", types: {}}, "zod-to-json-schema": {version: "3.25.2", types: {}}};
const failed=[];
for (const [name,[t,ok,bad]] of Object.entries(T)) {
  const o = z.object({value: t});
  const fits = v => o.safeParse({value: v}).success;
  const wrong=[...ok.filter(v=>!fits(v)).map(v=>["should fit",v]), ...bad.filter(v=>fits(v)).map(v=>["should not",v])];
  if (wrong.length) failed.push([name, JSON.stringify(wrong)]);
  for (const [k,opts] of [["zod",{}],["zod-draft-7",{target:"draft-7",io:"input"}]]) {
    try { const s=z.toJSONSchema(o,opts); out[k].types[name]={schema:s, fit:ok, unfit:bad}; }
    catch(e) { failed.push([name,k,e.message]); }
  }
}
const T3 = {
 string:[z3.z.string(),["a"],[1]], email:[z3.z.string().email(),["a@b.cc"],["a"]], url:[z3.z.string().url(),["https://a.b/c"],[1]], uuid:[z3.z.string().uuid(),[U],["x"]], cuid:[z3.z.string().cuid(),["cjld2cjxh0000qzrmn831i7rn"],["-"]], nanoid:[z3.z.string().nanoid(),["V1StGXR8_Z5jdHi6B-myT"],["a"]], ulid:[z3.z.string().ulid(),["01ARZ3NDEKTSV4RRFFQ69G5FAV"],["a"]], datetime:[z3.z.string().datetime(),["2024-02-29T12:30:00Z"],["a"]], date_string:[z3.z.string().date(),["2024-02-29"],["a"]], time:[z3.z.string().time(),[],["a"]], duration:[z3.z.string().duration(),["P1D"],["a"]], ip:[z3.z.string().ip(),["127.0.0.1"],["a"]], base64:[z3.z.string().base64(),["aGVsbG8="],[1]], jwt:[z3.z.string().jwt(),[],[]], regex:[z3.z.string().regex(/^[a-z]\d$/),["a1"],["1"]], emoji:[z3.z.string().emoji(),["😀"],["a"]], starts:[z3.z.string().startsWith("a"),["ab"],["b"]],
 number:[z3.z.number(),[1.5],["a"]], int:[z3.z.number().int().positive(),[1],[0,1.5]], multiple:[z3.z.number().multipleOf(5),[10],[7]], bigint:[z3.z.bigint(),[],[]], boolean:[z3.z.boolean(),[true],[1]], date:[z3.z.date(),[],[]], null:[z3.z.null(),[null],[1]], any:[z3.z.any(),[1],[]], literal:[z3.z.literal("a"),["a"],["b"]], enum:[z3.z.enum(["a","b"]),["a"],["c"]], native:[z3.z.nativeEnum({A:"x"}),["x"],["y"]],
 array:[z3.z.array(z3.z.string()).min(1),[["a"]],[[]]], tuple:[z3.z.tuple([z3.z.string(),z3.z.number()]),[["a",1]],[["a"],[1,1]]], tuple_rest:[z3.z.tuple([z3.z.string()]).rest(z3.z.number()),[["a",1]],[["a","b"]]], set:[z3.z.set(z3.z.string()),[],[]], object:[z3.z.object({a:z3.z.string(),b:z3.z.number().optional()}),[{a:"x"}],[{b:1}]], passthrough:[z3.z.object({a:z3.z.string()}).passthrough(),[{a:"x",c:1}],[{c:1}]], record:[z3.z.record(z3.z.string()),[{a:"b"}],[{a:1}]], record_key:[z3.z.record(z3.z.string().regex(/^x/),z3.z.number()),[{xa:1}],[{a:1}]], record_min:[z3.z.record(z3.z.string().min(2),z3.z.number()),[{xa:1}],[{a:1}]], record_enum:[z3.z.record(z3.z.enum(["a","b"]),z3.z.number()),[{a:1}],[{c:1}]], map:[z3.z.map(z3.z.string(),z3.z.number()),[],[]], union:[z3.z.union([z3.z.string(),z3.z.number()]),["a",1],[null]], discriminated:[z3.z.discriminatedUnion("k",[z3.z.object({k:z3.z.literal("a")}),z3.z.object({k:z3.z.literal("b")})]),[{k:"a"}],[{k:"c"}]], intersection:[z3.z.intersection(z3.z.object({a:z3.z.number()}),z3.z.object({b:z3.z.number()})),[{a:1,b:2}],[{a:1}]], nullable:[z3.z.string().nullable(),["a",null],[1]], optional:[z3.z.string().optional(),["a"],[1]], default:[z3.z.string().default("x"),["a"],[1]], catch:[z3.z.string().catch("x"),["a"],[]], branded:[z3.z.string().brand(),["a"],[1]], readonly:[z3.z.array(z3.z.string()).readonly(),[["a"]],[[1]]], pipe:[z3.z.string().pipe(z3.z.string().min(1)),["a"],[1]],
 lazy:[(()=>{const n=z3.z.lazy(()=>z3.z.object({c:z3.z.array(n)}));return n})(),[{c:[{c:[]}]}],[{}]], never:[z3.z.never().optional(),[],["a"]],
};
for (const [name,[t,ok,bad]] of Object.entries(T3)) {
  const o=z3.z.object({value:t});
  const fits = v => o.safeParse({value: v}).success;
  const wrong=[...ok.filter(v=>!fits(v)).map(v=>["should fit",v]), ...bad.filter(v=>fits(v)).map(v=>["should not",v])];
  if (wrong.length) failed.push(["v3 "+name, JSON.stringify(wrong)]);
  out["zod-to-json-schema"].types[name]={schema:zodToJsonSchema(o), fit:ok, unfit:bad};
}
if (failed.length) throw new Error(JSON.stringify(failed));
// one type a line, so that differences can be read
const lines = Object.entries(out).map(([name, {version, types}]) => {
  const rows = Object.entries(types).map(([type, row]) => `    ${JSON.stringify(type)}: ${JSON.stringify(row)}`);
  return `  ${JSON.stringify(name)}: {"version": ${JSON.stringify(version)}, "types": {\n${rows.join(",\n")}\n  }}`;
});
console.log(`{\n${lines.join(",\n")}\n}`);
