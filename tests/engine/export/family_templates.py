"""Chat templates with the properties of model families: tools, calls, results, reasoning, dates.

Each contains the texts that checkpoints of its family were trained on, but has a structure of its own.
"""

# Qwen2.5 and Qwen3: schemas follow the system text, calls are JSON between tags, and results share a user turn.
_QWEN_PARTS = r"""
{%- macro turn(role, text) -%}{{ '<|im_start|>' ~ role ~ '\n' ~ text ~ '<|im_end|>\n' }}{%- endmacro -%}
{%- macro head(system) -%}
  {%- if tools -%}
    {%- set listed = namespace(text='# Tools\n\nYou may call one or more functions to assist with the user query.\n\n'
       ~ 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>') -%}
    {%- for tool in tools -%}{%- set listed.text = listed.text ~ '\n' ~ (tool | tojson) -%}{%- endfor -%}
    {{ turn('system', (system ~ '\n\n' if system else '') ~ listed.text ~ '\n</tools>\n\nFor each function call, '
       ~ 'return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n'
       ~ '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>') }}
  {%- elif system -%}{{ turn('system', system) }}{%- endif -%}
{%- endmacro -%}
{%- macro calls(message, separator) -%}
  {%- for call in message.tool_calls or [] -%}
    {%- set function = call.function or call -%}
    {%- set given = function.arguments if function.arguments is string else function.arguments | tojson -%}
    {{ (separator if loop.first else '\n') ~ '<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": '
       ~ given ~ '}\n</tool_call>' }}
  {%- endfor -%}
{%- endmacro -%}
{%- macro result(place) -%}
  {{ '' if place and messages[place - 1].role == 'tool' else '<|im_start|>user' }}
  {{- '\n<tool_response>\n' ~ messages[place].content ~ '\n</tool_response>' }}
  {{- '' if messages[place + 1:] and messages[place + 1].role == 'tool' else '<|im_end|>\n' }}
{%- endmacro -%}
{{ head(messages[0].content if messages[0].role == 'system' else default) }}
"""
QWEN25_TEMPLATE = (
    r"""
{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' -%}"""
    + _QWEN_PARTS
    + r"""
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}{{ result(loop.index0) }}
  {%- elif message.tool_calls -%}
    {%- set content = '\n' ~ message.content if message.content else '' -%}
    {{ '<|im_start|>assistant' ~ content ~ calls(message, '\n') ~ '<|im_end|>\n' }}
  {%- elif message.role != 'system' or not loop.first -%}{{ turn(message.role, message.content) }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
)
# Qwen3 drops the reasoning of turns before the last question. A last turn without reasoning gets empty reasoning.
QWEN3_TEMPLATE = (
    r"""
{%- set default = '' -%}"""
    + _QWEN_PARTS
    + r"""
{%- set last = namespace(question=messages | length - 1) -%}
{%- for message in messages -%}
  {%- set is_result = message.content and message.content.startswith('<tool_response>') -%}
  {%- if message.role == 'user' and not (is_result and message.content.endswith('</tool_response>')) -%}
    {%- set last.question = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}{{ result(loop.index0) }}
  {%- elif message.role == 'assistant' -%}
    {%- set content = message.content or '' -%}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else '' -%}
    {%- if not message.reasoning_content and '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {%- if loop.index0 > last.question and (loop.last or thought) -%}
      {%- set text = '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ content.lstrip('\n') -%}
    {%- else -%}{%- set text = content -%}{%- endif -%}
    {{ turn('assistant', text ~ calls(message, '\n' if content else '')) }}
  {%- elif message.role == 'user' or not loop.first -%}{{ turn(message.role, message.content) }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|im_start|>assistant\n' ~ ('<think>\n\n</think>\n\n' if enable_thinking is false else '') }}
{%- endif -%}
"""
)
# Llama 3.2: today's date, schemas before the first question, one call per turn, and JSON results of ipython.
LLAMA3_TEMPLATE = r"""
{%- macro turn(role, text) -%}
  {{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' ~ text ~ '<|eot_id|>' }}
{%- endmacro -%}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
{%- set in_question = tools and (tools_in_user_message is not defined or tools_in_user_message) -%}
{%- set form = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
   ~ 'Do not use variables.\n\n' -%}
{%- set schemas = namespace(text='') -%}
{%- for tool in tools or [] -%}{%- set schemas.text = schemas.text ~ (tool | tojson(indent=4)) ~ '\n\n' -%}{%- endfor -%}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- set listed = 'You have access to the following functions. To call a function, please respond with JSON for a function '
   ~ 'call.' ~ form ~ schemas.text if tools and not in_question else '' -%}
{{ bos_token ~ turn('system', ('Environment: ipython\n' if tools else '')
   ~ 'Cutting Knowledge Date: December 2023\nToday Date: ' ~ date ~ '\n\n' ~ listed ~ system) }}
{%- for message in messages if message.role != 'system' -%}
  {%- if message.role in ['tool', 'ipython'] -%}{{ turn('ipython', message.content | tojson) }}
  {%- elif 'tool_calls' in message -%}
    {%- if message.tool_calls | length != 1 -%}{{ raise_exception('only one call per message') }}{%- endif -%}
    {%- set call = message.tool_calls[0].function -%}
    {{ turn('assistant', '{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}') }}
  {%- elif in_question and loop.first -%}
    {{ turn('user', 'Given the following functions, please respond with a JSON for a function call with its proper '
       ~ 'arguments that best answers the given prompt.\n\n' ~ form ~ schemas.text ~ (message.content | trim)) }}
  {%- else -%}{{ turn(message.role, message.content | trim) }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""
